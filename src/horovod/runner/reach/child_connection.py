"""A connection to an agent through a program that the launcher runs, such as ssh or srun: its standard input and output."""

from __future__ import annotations

import os
import signal
import subprocess
from abc import abstractmethod
from collections.abc import Mapping, Sequence

from horovod.control.fd_limit import limit_of_programs
from horovod.runner.errors import UsageError
from horovod.runner.reach.remote import AgentConnection

_EXIT_SECONDS = 1.0


class ChildConnection(AgentConnection):
    """A running program that starts an agent and connects it with this process.

    Args:
        command: the program and its arguments.
        environment: the program's environment; None for that of this process.

    Raises:
        ValueError: the program cannot be run.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # so that the terminal's Ctrl-C and Ctrl-Z reach the launcher only
                bufsize=0,
                preexec_fn=limit_of_programs(),  # srun passes its limits on
                env=None if environment is None else dict(environment),
            )
        except OSError as error:
            raise UsageError(f"cannot run {command[0]}, which reaches the other hosts: {error.strerror}") from None
        process = self._process
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self.writer, self.reader, self.errors = (
            os.dup(process.stdin.fileno()),
            os.dup(process.stdout.fileno()),
            process.stderr.fileno(),
        )
        process.stdin.close()
        process.stdout.close()

    @abstractmethod
    def say_why(self, status: int, errors: str, preamble: str) -> str:
        """Why the program, or the agent behind it, ended.

        Args:
            status: the program's exit status.
            errors, preamble: as for :meth:`explain`.
        """

    def explain(self, errors: str, preamble: str) -> str:
        try:
            status = self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return ""
        return self.say_why(status, errors, preamble)

    def close(self, *, orderly: bool) -> None:
        try:
            self._process.wait(_EXIT_SECONDS if orderly else 0)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGTERM)
            try:
                self._process.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)
                try:
                    self._process.wait(_EXIT_SECONDS)
                except subprocess.TimeoutExpired:
                    pass  # it waits inside the kernel; the launcher does not wait for it
        if self._process.stderr is not None:
            self._process.stderr.close()

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self._process.pid, number)  # the program, and a command that it may use as a proxy
        except OSError:
            pass  # all gone
