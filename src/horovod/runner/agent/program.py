"""The agent as a program: runs the ranks of a host that is not the launcher's, and ends them when the launcher is gone.

ssh, srun or kubexec starts it. Orders arrive on standard input and events go to standard output; nothing else is sent there.
"""

from __future__ import annotations

import os
import signal
import tty
from collections.abc import Mapping, Sequence
from pathlib import Path

from horovod._base import config
from horovod.runner.agent.agent_program import AgentProgram, CannotTakePart
from horovod.runner.agent.base import Agent
from horovod.runner.agent.guardian import Guardian
from horovod.runner.agent.local_agent import LocalAgent
from horovod.runner.agent.messages import Prepare, ProcessPlan, Signalled


class Program(AgentProgram):
    """The agent of this host, over two descriptors that belong to it from now on."""

    def __init__(self, reader: int, writer: int) -> None:
        self._processes: _HostAgent | None = None
        self._guardian: Guardian | None = None
        self._signals, self._wakeup = os.pipe()
        for descriptor in (self._signals, self._wakeup):
            os.set_blocking(descriptor, False)
        super().__init__(reader, writer)

    def run(self) -> None:
        """Follow the launcher's orders until the launcher ends the job, or is gone."""
        signal.signal(signal.SIGTERM, lambda *_: None)
        before = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        self._loop.watch(self._signals, self._on_signals)
        try:
            super().run()
        finally:
            signal.set_wakeup_fd(before)
            os.close(self._signals)
            os.close(self._wakeup)

    def _make_local(self, order: Prepare) -> Agent:
        try:
            os.chdir(order.directory or ".")
        except OSError as error:
            raise CannotTakePart(
                f"the launcher's working directory {order.directory} cannot be entered there: {error.strerror}"
            ) from None
        mark = f"{config.SECRET_KEY}={order.secret}".encode()
        try:
            self._guardian = Guardian(mark, os.environ)
        except OSError as error:
            raise CannotTakePart(
                f"the guardian, which ends the ranks if the agent is killed, cannot start: {error.strerror}"
            ) from None
        self._processes = _HostAgent(
            (), self._loop, self._report, self._facts(), mark=mark, guardian=self._guardian, inherits_input=False
        )
        self._processes.directory = order.directory or str(Path.cwd())
        return self._processes

    def _release(self) -> None:
        if self._guardian is not None:
            self._guardian.__exit__(None)
        self._loop.unwatch(self._signals)

    def _on_congestion(self, congested: bool) -> None:
        if self._processes is not None:
            if congested:
                self._processes.pause()
            else:
                self._processes.resume()

    def _on_signals(self) -> None:
        """Report SIGTERM to the launcher, which ends the whole job. End this host's part at once: the launcher may be gone."""
        if signal.SIGTERM in os.read(self._signals, 512):
            self._tell(Signalled(signal.SIGTERM))
            self._on_launcher_gone("")

    def _on_launcher_gone(self, reason: str) -> None:
        if self._processes is not None:
            self._processes.resume()  # discards what the ranks write, so that they can end
        super()._on_launcher_gone(reason)


class _HostAgent(LocalAgent):
    """Its processes have the agent's environment, too."""

    directory = ""
    """Where they run."""

    def start(self, environment: Mapping[str, str], plans: Sequence[ProcessPlan]) -> None:
        super().start({**os.environ, **environment, "PWD": self.directory}, plans)


def main() -> None:
    """The program. Its standard input and output carry messages, so text printed by mistake goes to standard error."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the processes it starts would inherit
    reader, writer = os.dup(0), os.dup(1)
    if os.isatty(writer):  # srun gives it a terminal, which would change some bytes
        tty.setraw(writer)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    Program(reader, writer).run()
