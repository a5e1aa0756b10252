"""Starts, reads, signals and ends the processes of this host.

It runs in the launcher's own loop for the launcher's host, and in the agent program's loop for any other. In every case, no
process of the job is left at its end.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from horovod.runner import open_files
from horovod.runner.agent import process_tree
from horovod.runner.agent.agent_processes import STREAMS, StartedProcess
from horovod.runner.agent.base import Agent, HostFacts, Report
from horovod.runner.agent.grace_period import GRACE_SECONDS
from horovod.runner.agent.guardian import Guardian
from horovod.runner.agent.messages import Closed, Ended, InputConsumed, NotStarted, OutputData, ProcessPlan, Stopped
from horovod.runner.children import owned
from horovod.runner.errors import LaunchError
from horovod.runner.event_loop import Loop

_GIVE_UP_SECONDS = 0.5
"""How long after SIGKILL a process may still appear as running."""
_LAST_CHUNKS = 16
"""The most reads from a pipe that does not end. A pipe holds no more, unless a process keeps writing to it."""


class LocalAgent(Agent):
    """The agent of the host that this process runs on.

    Args:
        loop: calls this object when something happens.
        mark: bytes that every process of the job, and no other process, has in its environment.
        guardian: ends the processes if this one dies.
        inherits_input: whether a process that reads standard input gets this process's descriptor; if not, :meth:`feed` sends
            it the input.
    """

    def __init__(
        self,
        hosts: Collection[str],
        loop: Loop,
        report: Report,
        facts: HostFacts,
        *,
        mark: bytes,
        guardian: Guardian | None,
        inherits_input: bool,
    ) -> None:
        super().__init__(hosts)
        self.facts = facts
        self._loop = loop
        self._report = report
        self._mark = mark
        self._guardian = guardian
        self._inherits_input = inherits_input
        self._processes: dict[int, StartedProcess] = {}
        self._open: set[tuple[int, str]] = set()  # streams
        self._input: dict[int, bytes] = {}  # what a process has not taken yet
        self._paused = False
        self._kill_at: float | None = None  # when SIGKILL is sent to what still runs
        self._hunt = False

    def start(self, environment: Mapping[str, str], plans: Sequence[ProcessPlan]) -> None:
        number = plans[0].number
        try:
            open_files.make_room(open_files.PROCESS * len(plans), f"an agent with {len(plans)} processes")
            for plan in plans:
                number = plan.number
                process = owned(self._start, plan, {**environment, **plan.environment})
                if process.input is not None:
                    self._report(self, InputConsumed(number))
        except LaunchError as error:
            self._report(self, NotStarted(number, str(error)))

    def _start(self, plan: ProcessPlan, environment: Mapping[str, str]) -> StartedProcess:
        process = self._processes[plan.number] = StartedProcess(
            plan, environment, inherits_input=self._inherits_input and plan.reads_input
        )
        if self._guardian is not None:
            self._guardian.watch_over(process.session)
        self._loop.watch(process.ended, partial(self._on_end, process))
        for name in STREAMS:
            self._open.add((plan.number, name))
            if not self._paused:
                self._loop.watch(process.descriptor(name), partial(self._read, process, name))
        return process

    def signal(self, number: int, processes: Collection[int]) -> None:
        for process in processes:
            if process in self._processes:
                self._processes[process].signal_group(number)

    def look(self) -> None:
        for process in list(self._processes.values()):
            if self._loop.watches(process.ended):
                self._on_end(process)
        self._report(self, Stopped([number for number, process in self._processes.items() if process.stopped]))

    def feed(self, process: int, data: bytes) -> None:
        pipe = self._processes[process].input if process in self._processes else None
        if pipe is None or pipe.closed:
            return
        if not data:
            pipe.close()
            return
        self._input[process] = data
        self._loop.watch(pipe.fileno(), partial(self._write, process), for_writing=True)

    def end(self, grace: float, *, hunt: bool) -> None:
        if self.closed:
            return
        first, now = self._kill_at is None, time.monotonic()
        self._hunt = self._hunt or hunt
        self._kill_at = now + grace if self._kill_at is None else min(self._kill_at, now + grace)
        if first and (hunt or self._running()):
            for process in self._processes.values():
                process.signal_group(signal.SIGTERM)
            strays = process_tree.members((), self._mark)
            process_tree.send([pid for pid in strays if not self._was_signalled(pid)], signal.SIGTERM)
        self._loop.after((self, "kill"), self._kill_at - now, self._kill_all)
        self._close_if_over()

    def kill(self) -> None:
        if not self.closed:
            owned(self._kill)

    def _kill(self) -> None:
        self.closed = True
        process_tree.send(self._members(), signal.SIGKILL)
        self._release()

    def pause(self) -> None:
        """Read no more output until :meth:`resume`. A process that writes then waits."""
        if not self._paused:
            self._paused = True
            for number, name in self._open:
                self._loop.unwatch(self._processes[number].descriptor(name))

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            for number, name in self._open:
                process = self._processes[number]
                self._loop.watch(process.descriptor(name), partial(self._read, process, name))

    # Called by the loop.

    def _read(self, process: StartedProcess, name: str) -> bool:
        """Report what has arrived on a stream. Returns False if nothing has: at the moment, or because the stream has ended."""
        if (process.number, name) not in self._open:
            return False
        data = process.read(name)
        if data is None:
            return False  # nothing at the moment
        if data:
            self._report(self, OutputData(process.number, name, data))
        else:
            self._close_stream(process, name)
        return bool(data)

    def _write(self, number: int) -> None:
        pipe = self._processes[number].input
        assert pipe is not None
        try:
            data = self._input[number] = self._input[number][os.write(pipe.fileno(), self._input[number]) :]
            if data:
                return
            self._loop.unwatch(pipe.fileno())
        except BlockingIOError:
            return
        except OSError:  # the process reads no more
            self._loop.unwatch(pipe.fileno())
            pipe.close()
        del self._input[number]
        if not pipe.closed:
            self._report(self, InputConsumed(number))

    def _on_end(self, process: StartedProcess) -> None:
        end = process.look()
        if end is None:
            return
        self._loop.unwatch(process.ended)
        self._loop.after((process, "leftovers"), GRACE_SECONDS, partial(self._abandon, process))
        process.signal_group(signal.SIGTERM)  # ends what the rank started
        self._report(self, Ended(process.number, end))
        self._close_if_over()

    # How processes and streams are ended.

    def _close_stream(self, process: StartedProcess, name: str) -> None:
        self._open.remove((process.number, name))
        if not self._paused:
            self._loop.unwatch(process.descriptor(name))
        process.close(name)
        self._report(self, OutputData(process.number, name, b""))
        self._close_if_over()

    def _drain(self, process: StartedProcess, name: str) -> None:
        """Report what is still in the pipe, and close it. A process outside the job may hold its other end open."""
        for _ in range(_LAST_CHUNKS):
            if not self._read(process, name):
                break
        if (process.number, name) in self._open:
            self._close_stream(process, name)

    def _abandon(self, process: StartedProcess) -> None:
        """Kill what a process that has ended left behind: processes that it started may still run, or hold its output open."""
        process.signal_group(signal.SIGKILL)
        for name in STREAMS:
            self._drain(process, name)
        self._loop.after((process, "forget"), _GIVE_UP_SECONDS, partial(self._forget, process))

    def _forget(self, process: StartedProcess) -> None:
        """Forget a process that has ended completely: an elastic job may have any number of them."""
        if not process_tree.members([process.session]):
            self._let_go(process)
            del self._processes[process.number]

    def _was_signalled(self, pid: int) -> bool:
        try:
            return os.getpgid(pid) in self._sessions()
        except OSError:
            return True  # it has just ended

    def _kill_all(self) -> None:
        process_tree.send(self._members(), signal.SIGKILL)
        self._loop.after((self, "give up"), _GIVE_UP_SECONDS, self._close)

    def _close_if_over(self) -> None:
        if self._kill_at is not None and not self.closed and not self._open and not self._running():
            self._close()

    def _close(self) -> None:
        """End what is left; normally nothing."""
        if self.closed:
            return
        self.closed = True
        grace = 0.0 if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
        left: set[int] = set()
        try:
            left = process_tree.end(self._members, grace)
        except BaseException:  # a second Ctrl-C: kill at once
            process_tree.send(self._members(), signal.SIGKILL)
            raise
        finally:
            self._release()
        self._report(self, Closed(sorted(left)))

    def _release(self) -> None:
        for process in self._processes.values():
            self._let_go(process)
        self._loop.cancel((self, "kill"))
        self._loop.cancel((self, "give up"))

    def _let_go(self, process: StartedProcess) -> None:
        for name in STREAMS:
            self._drain(process, name)
        if process.number in self._input and process.input is not None:
            self._loop.unwatch(process.input.fileno())
        if self._loop.watches(process.ended):
            self._loop.unwatch(process.ended)
        for timer in ("leftovers", "forget"):
            self._loop.cancel((process, timer))
        if process.look() is not None and self._guardian is not None:
            self._guardian.forget(process.session)
        process.reap()

    def _running(self) -> bool:
        return any(process.exit is None for process in self._processes.values())

    def _sessions(self) -> list[int]:
        return [process.session for process in self._processes.values()]

    def _members(self) -> set[int]:
        """The remaining processes. Those outside their session are searched for in failed jobs only."""
        return process_tree.members(self._sessions(), self._mark if self._hunt else b"")
