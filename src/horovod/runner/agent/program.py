"""The agent as a program: runs the ranks of a host that is not the launcher's, and ends them when the launcher is gone.

ssh, srun or kubexec starts it. Orders arrive on standard input and events go to standard output; nothing else is sent there.
The agent counts the launcher as gone when either of these is closed, or when the launcher's host stops acknowledging. A second
connection, to the launcher's rendezvous server, detects that: nothing is sent on it, and TCP keep-alive probes it. A launcher
that is stopped, or that waits for a terminal, therefore counts as alive.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import tty
from pathlib import Path

from horovod._base import config
from horovod._base.version import VERSION
from horovod.control.connection import Connection
from horovod.control.dial import Address, dial_until, set_keepalive
from horovod.control.rendezvous.messages import PURPOSE
from horovod.control.secret import decode_secret
from horovod.runner.agent.base import Agent, HostFacts
from horovod.runner.agent.guardian import Guardian
from horovod.runner.agent.local_agent import LocalAgent
from horovod.runner.agent.messages import (
    GREETING,
    AgentEvent,
    AgentOrder,
    AgentReady,
    Closed,
    End,
    Hello,
    Input,
    Look,
    Lost,
    Prepare,
    Refused,
    Signal,
    Signalled,
    StartProcesses,
    decode_order,
    encode,
)
from horovod.runner.agent.process_tree import GRACE_SECONDS
from horovod.runner.agent.stream import MessageStream
from horovod.runner.event_loop import Loop
from horovod.runner.machine import usable_cores

LOST_AFTER_SECONDS = 15.0
"""How long the launcher's host may acknowledge nothing."""
_LAST_MESSAGES_SECONDS = 5.0
"""How long to try to send the last messages."""


class Program:
    """One agent, over two descriptors that belong to it from now on."""

    def __init__(self, reader: int, writer: int) -> None:
        self._loop = Loop()
        self._local: LocalAgent | None = None
        self._guardian: Guardian | None = None
        self._rendezvous: Connection | None = None  # the connection to the rendezvous server
        self._directory = "/"
        self._over = False
        self._signals, self._wakeup = os.pipe()
        for descriptor in (self._signals, self._wakeup):
            os.set_blocking(descriptor, False)
        self._stream = MessageStream(
            self._loop, reader, writer, decode_order, self._follow, self._on_launcher_gone, self._on_congestion
        )

    def run(self) -> None:
        """Follow the launcher's orders until the launcher ends the job, or is gone."""
        facts = self._facts()
        signal.signal(signal.SIGTERM, lambda *_: None)
        before = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        self._loop.watch(self._signals, self._on_signals)
        self._stream.write(GREETING)
        self._tell(Hello(VERSION, facts.python, facts.cores, list(facts.interfaces)))
        try:
            self._loop.run(lambda: self._over)
            self._loop.run(lambda: self._stream.idle, time.monotonic() + _LAST_MESSAGES_SECONDS)
        finally:
            if self._local is not None:
                self._local.kill()
            if self._guardian is not None:
                self._guardian.__exit__(None)
            if self._rendezvous is not None:
                self._loop.unwatch(self._rendezvous.fileno())
                self._rendezvous.close()
            self._stream.close()
            signal.set_wakeup_fd(before)
            self._loop.unwatch(self._signals)
            os.close(self._signals)
            os.close(self._wakeup)
            self._loop.close()

    def _facts(self) -> HostFacts:
        return HostFacts(sys.executable, usable_cores(), [name for _, name in socket.if_nameindex()], None)

    def _tell(self, event: AgentEvent) -> None:
        self._stream.send(encode(event))

    def _follow(self, order: AgentOrder) -> None:
        if isinstance(order, Prepare):
            self._begin(order)
        elif self._local is None:
            self._over = True  # the launcher ends the job before it began
        elif isinstance(order, StartProcesses):
            self._local.start({**os.environ, **order.environment, "PWD": self._directory}, order.plans)
        elif isinstance(order, Signal):
            self._local.signal(order.number, order.processes)
        elif isinstance(order, Look):
            self._local.look()
        elif isinstance(order, Input):
            self._local.feed(order.process, order.data)
        elif isinstance(order, End):
            self._local.end(order.grace, hunt=order.hunt)

    def _begin(self, order: Prepare) -> None:
        try:
            os.chdir(order.directory or ".")
        except OSError as error:
            self._refuse(
                f"the launcher's working directory {order.directory} cannot be entered there: {error.strerror}"
            )
            return
        self._directory = order.directory or str(Path.cwd())
        addresses: list[Address] = list(order.addresses)
        try:
            self._rendezvous = dial_until(
                addresses, decode_secret(order.secret), PURPOSE, time.monotonic() + order.seconds
            )  # fmt: skip
        except ConnectionError as error:
            self._refuse(f"the launcher cannot be reached from there: {error}")
            return
        set_keepalive(self._rendezvous.socket, LOST_AFTER_SECONDS)
        host, port = self._rendezvous.socket.getpeername()[:2]
        self._loop.watch(self._rendezvous.fileno(), self._on_rendezvous_lost)
        mark = f"{config.SECRET_KEY}={order.secret}".encode()
        try:
            self._guardian = Guardian(mark, os.environ)
        except OSError as error:
            self._refuse(f"the guardian, which ends the ranks if the agent is killed, cannot start: {error.strerror}")
            return
        self._local = LocalAgent(
            (), self._loop, self._report, self._facts(), mark=mark, guardian=self._guardian, inherits_input=False
        )
        self._tell(AgentReady((host, port)))

    def _refuse(self, reason: str) -> None:
        self._tell(Refused(reason))
        self._over = True

    def _report(self, _: Agent, event: AgentEvent) -> None:
        self._tell(event)
        if isinstance(event, Closed):
            self._over = True

    def _on_congestion(self, congested: bool) -> None:
        if self._local is not None:
            if congested:
                self._local.pause()
            else:
                self._local.resume()

    def _on_signals(self) -> None:
        """Report SIGTERM to the launcher, which ends the whole job. End this host's part at once: the launcher may be gone."""
        if signal.SIGTERM in os.read(self._signals, 512):
            self._tell(Signalled(signal.SIGTERM))
            self._on_launcher_gone("")

    def _on_rendezvous_lost(self) -> None:
        assert self._rendezvous is not None
        try:
            reason = "it was closed" if not self._rendezvous.socket.recv(1) else "it sent unexpected data"
        except OSError as error:
            reason = error.strerror or str(error)
        self._tell(Lost(f"its connection to the launcher's rendezvous server broke: {reason}"))
        self._loop.unwatch(self._rendezvous.fileno())
        self._rendezvous.close()
        self._rendezvous = None
        self._on_launcher_gone(reason)

    def _on_launcher_gone(self, _: str) -> None:
        if self._local is None:
            self._over = True
        else:
            self._local.resume()  # discards what the ranks write, so that they can end
            self._local.end(GRACE_SECONDS, hunt=True)


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
