"""One process: started in a new session, watched without being reaped, ended with all of its children.

An ended process stays a zombie until its job is over. The kernel does not reuse the number of a zombie, so a signal to its
group cannot reach another process.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Mapping

from horovod.control.fd_limit import limit_of_programs
from horovod.control.processes import STOPPED, why_not_running
from horovod.runner.agent.messages import CHUNK_BYTES, Exit, ProcessPlan
from horovod.runner.errors import LaunchError

STREAMS = ("stdout", "stderr")
_WHY_A_FILE_CANNOT_RUN = {  # although it is there and executable
    errno.ENOENT: "; the interpreter that its first line names does not exist",
    errno.ENOEXEC: "; it is not a program for this machine, or a script without a first line such as #!/bin/sh",
}


class StartedProcess:
    """A started process.

    Args:
        plan: what to start.
        environment: its whole environment.
        inherits_input: whether a process that reads standard input gets this process's own descriptor; if not, a pipe.

    Raises:
        LaunchError: the process could not be started.
    """

    def __init__(self, plan: ProcessPlan, environment: Mapping[str, str], *, inherits_input: bool) -> None:
        self.plan = plan
        source = None if inherits_input else subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                plan.command,
                env=dict(environment),
                stdin=source if plan.reads_input else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                bufsize=0,
                preexec_fn=limit_of_programs(),
            )
            self.ended = _descriptor_of_end(self._process.pid)
            """A descriptor that becomes readable when the process has ended."""
        except OSError as error:
            found = shutil.which(plan.command[0], path=environment.get("PATH")) is not None
            why = (
                f"{error.strerror}" + _WHY_A_FILE_CANNOT_RUN.get(error.errno or 0, "") if found else "command not found"
            )
            raise LaunchError(f"cannot start rank {plan.number} ({plan.command[0]}): {why}") from error
        assert self._process.stdout is not None and self._process.stderr is not None
        self._pipes = {"stdout": self._process.stdout, "stderr": self._process.stderr}
        self.input = self._process.stdin
        """The pipe to its standard input, if there is one."""
        for pipe in (*self._pipes.values(), *([self.input] if self.input else ())):
            os.set_blocking(pipe.fileno(), False)
        self.exit: Exit | None = None

    @property
    def number(self) -> int:
        return self.plan.number

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
                self.exit = Exit(255)  # other code in this process reaped it, so its exit code is lost
                return self.exit
            if found is not None:
                killed = found.si_code != os.CLD_EXITED
                self.exit = Exit(128 + found.si_status, found.si_status) if killed else Exit(found.si_status)
        return self.exit

    @property
    def stopped(self) -> bool:
        """Whether the process is stopped (SIGSTOP, Ctrl-Z), other than by a debugger."""
        return self.exit is None and why_not_running(self._process.pid) == STOPPED

    def signal_group(self, number: int) -> None:
        """Signal the process and what it started, except children that left its group."""
        try:
            os.killpg(self._process.pid, number)
            if number == signal.SIGTERM:
                os.killpg(self._process.pid, signal.SIGCONT)  # a stopped process could not act on the first signal
        except OSError:
            pass  # all have ended

    def descriptor(self, name: str) -> int:
        """The descriptor that the stream ``name`` is read from."""
        return self._pipes[name].fileno()

    def read(self, name: str) -> bytes | None:
        """Data that has arrived on a stream; b"" at the end of the stream, None if no data has arrived."""
        try:
            return os.read(self.descriptor(name), CHUNK_BYTES)
        except BlockingIOError:
            return None

    def close(self, name: str) -> None:
        """Close this end of a stream. Idempotent."""
        self._pipes[name].close()

    def reap(self) -> None:
        """Reap an ended process and close all descriptors. The kernel may reuse its number afterwards. Idempotent."""
        for name in STREAMS:
            self.close(name)
        if self.input is not None:
            self.input.close()
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
