"""An agent that is not in the launcher's process: follows the launcher's orders, which come over a stream of messages.

The agent counts the launcher as gone when the stream is closed, or when the launcher's host stops acknowledging. A second
connection, to the launcher's rendezvous server, detects that: nothing is sent on it, and TCP keep-alive probes it. A launcher
that is stopped, or that waits for a terminal, therefore counts as alive.
"""

from __future__ import annotations

import socket
import sys
import time
from abc import ABC, abstractmethod

from horovod._base.version import VERSION
from horovod.control.connection import Connection
from horovod.control.dial import Address, dial_until, set_keepalive
from horovod.control.rendezvous.messages import PURPOSE
from horovod.control.secret import decode_secret
from horovod.runner.agent.base import Agent, HostFacts
from horovod.runner.agent.grace_period import GRACE_SECONDS
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
    StartProcesses,
    decode_order,
    encode,
)
from horovod.runner.agent.stream import MessageStream
from horovod.runner.event_loop import Loop
from horovod.runner.machine import usable_cores

LOST_AFTER_SECONDS = 15.0
"""How long the launcher's host may acknowledge nothing."""
_LAST_MESSAGES_SECONDS = 5.0
"""How long to try to send the last messages."""


class CannotTakePart(Exception):
    """This host cannot take part in the job; the text says why."""


class AgentProgram(ABC):
    """One agent, over two descriptors that belong to it from now on."""

    def __init__(self, reader: int, writer: int) -> None:
        self._loop = Loop()
        self._local: Agent | None = None  # what carries out the orders
        self._rendezvous: Connection | None = None  # the connection to the rendezvous server
        self._over = False
        self._stream = MessageStream(
            self._loop, reader, writer, decode_order, self._follow, self._on_launcher_gone, self._on_congestion
        )

    def run(self) -> None:
        """Follow the launcher's orders until the launcher ends the job, or is gone."""
        facts = self._facts()
        self._stream.write(GREETING)
        self._tell(Hello(VERSION, facts.python, facts.cores, list(facts.interfaces)))
        try:
            self._loop.run(lambda: self._over)
            self._loop.run(lambda: self._stream.idle, time.monotonic() + _LAST_MESSAGES_SECONDS)
        finally:
            if self._local is not None:
                self._local.kill()
            self._release()
            if self._rendezvous is not None:
                self._loop.unwatch(self._rendezvous.fileno())
                self._rendezvous.close()
            self._stream.close()
            self._loop.close()

    @abstractmethod
    def _make_local(self, order: Prepare) -> Agent:
        """Make what carries out the orders. Called once, when the rendezvous server has been reached.

        Raises:
            CannotTakePart: it cannot be made.
        """

    @abstractmethod
    def _release(self) -> None:
        """Called at the end of :meth:`run`, when nothing of the job is left here."""

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
            self._local.start(order.environment, order.plans)
        elif isinstance(order, Signal):
            self._local.signal(order.number, order.processes)
        elif isinstance(order, Look):
            self._local.look()
        elif isinstance(order, Input):
            self._local.feed(order.process, order.data)
        elif isinstance(order, End):
            self._local.end(order.grace, hunt=order.hunt)

    def _begin(self, order: Prepare) -> None:
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
        try:
            self._local = self._make_local(order)
        except CannotTakePart as reason:
            self._refuse(str(reason))
            return
        self._tell(AgentReady((host, port)))

    def _refuse(self, reason: str) -> None:
        self._tell(Refused(reason))
        self._over = True

    def _report(self, _: Agent, event: AgentEvent) -> None:
        self._tell(event)
        if isinstance(event, Closed):
            self._over = True

    @abstractmethod
    def _on_congestion(self, congested: bool) -> None:
        """Much waits to be sent to the launcher, or no longer."""

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
            self._local.end(GRACE_SECONDS, hunt=True)
