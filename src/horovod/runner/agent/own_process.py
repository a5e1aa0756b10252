"""The agent of a rank that something else has started, and ends: the agent runs on a thread of that process.

The launcher connects to it as to any agent. Its order to start a process gives this process its variables.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence

from horovod.control.wakeup import WakeUp
from horovod.runner.agent.agent_processes import STREAMS
from horovod.runner.agent.agent_program import AgentProgram
from horovod.runner.agent.base import Agent, Report
from horovod.runner.agent.messages import Closed, Ended, Exit, NotStarted, OutputData, Prepare, ProcessPlan, Stopped
from horovod.runner.event_loop import Loop

_END_SECONDS = 10.0
"""How long it may take to tell the launcher that this rank has ended."""


class NotWanted(Exception):
    """The launcher has ended, or has gone, before it wanted this process as a rank."""


class RankOfOwnProcess:
    """This process as a rank, over a connection of the launcher.

    Args:
        connection: belongs to this object from now on.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._variables: queue.SimpleQueue[Mapping[str, str] | None] = queue.SimpleQueue()
        self._program = _Program(os.dup(connection.fileno()), connection.detach(), self._variables.put)
        self._thread = threading.Thread(target=self._run, name="horovod-agent", daemon=True)
        self._thread.start()

    def begin(self, seconds: float) -> Mapping[str, str]:
        """Wait until the launcher starts this rank. Returns its variables. Call it once.

        Args:
            seconds: how long to wait.

        Raises:
            NotWanted: the launcher has ended.
            TimeoutError: it has said nothing in time.
        """
        try:
            variables = self._variables.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"the launcher has not started this rank within {seconds:g} seconds") from None
        if variables is None:
            raise NotWanted("the job of the other ranks has ended before this one could join it")
        return variables

    def end(self, end: Exit) -> None:
        """Tell the launcher how the rank's work has ended. The process may go on."""
        self._program.end_rank(end)
        self._program.end_reported.wait(_END_SECONDS)

    def _run(self) -> None:
        try:
            self._program.run()
        finally:
            self._variables.put(None)
            self._program.end_reported.set()


class _Program(AgentProgram):
    """The agent, on a thread of its own.

    Attributes:
        end_reported: set once the launcher knows that the rank has ended, or the launcher is gone.
    """

    def __init__(self, reader: int, writer: int, begin: Callable[[Mapping[str, str]], object]) -> None:
        super().__init__(reader, writer)
        self._begin_rank = begin
        self._rank: _OwnProcess | None = None
        self._end: Exit | None = None
        self._ended = WakeUp()
        self.end_reported = threading.Event()
        self._loop.watch(self._ended.fileno(), self._tell_end)

    def end_rank(self, end: Exit) -> None:
        """Any thread may call it."""
        self._end = end
        self._ended.set()

    def _make_local(self, order: Prepare) -> Agent:
        self._rank = _OwnProcess(self._loop, self._report, self._begin_rank)
        return self._rank

    def _tell_end(self) -> None:
        self._ended.clear()
        if self._rank is not None and self._end is not None:
            self._rank.work_ended(self._end)
        self.end_reported.set()

    def _on_congestion(self, congested: bool) -> None:
        pass  # it sends no output of the rank

    def _release(self) -> None:
        self._loop.unwatch(self._ended.fileno())
        self._ended.close()


class _OwnProcess(Agent):
    """Has one process, and starts and ends none."""

    def __init__(self, loop: Loop, report: Report, begin: Callable[[Mapping[str, str]], object]) -> None:
        super().__init__(())
        self._loop = loop
        self._report = report
        self._begin = begin
        self._number: int | None = None
        self._over = False
        self._may_end = False

    def start(self, environment: Mapping[str, str], plans: Sequence[ProcessPlan]) -> None:
        for plan in plans:
            if self._number is not None:
                self._report(self, NotStarted(plan.number, "this process is a rank already, and starts no others"))
                return
            self._number = plan.number
            self._begin({**environment, **plan.environment})

    def work_ended(self, end: Exit) -> None:
        """The work of the rank has ended."""
        if self._number is not None and not self._over:
            self._over = True
            for stream in STREAMS:  # its output is not the launcher's
                self._report(self, OutputData(self._number, stream, b""))
            self._report(self, Ended(self._number, end))

    def signal(self, number: int, processes: Collection[int]) -> None:
        """A request to end is answered by the rank itself, which gets no further rank. A stuck rank is killed."""
        if self._number not in processes or self._over:
            return
        if number == signal.SIGTERM:
            self._may_end = True
        elif number != signal.SIGKILL or not self._may_end:
            os.kill(os.getpid(), number)

    def look(self) -> None:
        self._report(self, Stopped([]))

    def feed(self, process: int, data: bytes) -> None:
        pass  # it reads no input of the launcher

    def end(self, grace: float, *, hunt: bool) -> None:
        """The process belongs to what has started it, so it goes on. Its collectives fail if the job has."""
        if not self.closed:
            self.closed = True
            self._report(self, Closed([]))

    def kill(self) -> None:
        self.closed = True
