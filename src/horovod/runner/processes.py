"""One rank's process: started in a session of its own, watched without being reaped, ended with all of its children.

An ended process is kept as a zombie until its job is over. While it is one, its number cannot go to anybody else, so a
signal to its group can never hit a stranger.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from horovod.runner.errors import LaunchError

STREAMS = ("stdout", "stderr")
_CHUNK = 1 << 16
_WHY_A_FILE_CANNOT_RUN = {  # the launcher has seen before that the file is there and executable
    errno.ENOENT: "; the interpreter that its first line names does not exist",
    errno.ENOEXEC: "; it is no program of this machine, or a script without a first line such as #!/bin/sh",
}


@dataclass(frozen=True)
class ProcessPlan:
    """What to start for a rank."""

    rank: int
    place: str
    """Where it runs, for people: "localhost, local rank 1"."""
    command: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Exit:
    """How a process ended."""

    code: int
    """The exit code, or 128 + the number of the signal."""
    signal: int = 0
    """The signal that ended it, or 0."""

    def __str__(self) -> str:
        if not self.signal:
            return str(self.code)
        try:
            name = signal.Signals(self.signal).name
        except ValueError:
            name = f"signal {self.signal}"
        return f"{self.code} (killed by {name})"


class RankProcess:
    """A started process.

    Args:
        reads_input: whether it gets this process's standard input; it has nothing to read otherwise.
    """

    def __init__(self, plan: ProcessPlan, *, reads_input: bool = False) -> None:
        self.plan = plan
        try:
            self._process = subprocess.Popen(
                plan.command,
                env=dict(plan.environment),
                stdin=None if reads_input else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                bufsize=0,
            )
            self.ended = _descriptor_of_end(self._process.pid)
            """A descriptor that becomes readable when the process has ended."""
        except OSError as error:
            why = _WHY_A_FILE_CANNOT_RUN.get(error.errno or 0, "")
            raise LaunchError(f"cannot start rank {plan.rank} ({plan.command[0]}): {error.strerror}{why}") from error
        assert self._process.stdout is not None and self._process.stderr is not None
        self._pipes = {"stdout": self._process.stdout, "stderr": self._process.stderr}
        for pipe in self._pipes.values():
            os.set_blocking(pipe.fileno(), False)
        self.exit: Exit | None = None

    @property
    def rank(self) -> int:
        return self.plan.rank

    @property
    def session(self) -> int:
        """The process id, which is also that of its session and its group."""
        return self._process.pid

    def look(self) -> Exit | None:
        """How the process ended, or None while it runs. Leaves it unreaped."""
        if self.exit is None:
            try:
                found = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                self.exit = Exit(255)  # other code of this process reaped it, and with it the truth
                return self.exit
            if found is not None:
                killed = found.si_code != os.CLD_EXITED
                self.exit = Exit(128 + found.si_status, found.si_status) if killed else Exit(found.si_status)
        return self.exit

    def signal_group(self, number: int) -> None:
        """Signal the process and what it started, except children that left its group."""
        try:
            os.killpg(self._process.pid, number)
            if number == signal.SIGTERM:
                os.killpg(self._process.pid, signal.SIGCONT)  # a stopped process could not act on the first signal
        except OSError:
            pass  # all gone

    def descriptor(self, name: str) -> int:
        """The descriptor that the stream ``name`` is read from."""
        return self._pipes[name].fileno()

    def read(self, name: str) -> bytes | None:
        """What has arrived on a stream: b"" at its end, None if nothing has."""
        try:
            return os.read(self.descriptor(name), _CHUNK)
        except BlockingIOError:
            return None

    def close(self, name: str) -> None:
        """Close this end of a stream. Idempotent."""
        self._pipes[name].close()

    def reap(self) -> None:
        """Let go of an ended process and all descriptors. Its number is free afterwards. Idempotent."""
        for name in STREAMS:
            self.close(name)
        if self.ended >= 0:
            os.close(self.ended)
            self.ended = -1
        if self.exit is not None:
            self._process.wait()


def _descriptor_of_end(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # an old kernel, or a sandbox without this call
        reader, writer = os.pipe()

        def wait() -> None:
            try:
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            except ChildProcessError:
                pass
            os.close(writer)

        threading.Thread(target=wait, name=f"horovod-wait-{pid}", daemon=True).start()
        return reader
