"""The launcher's side of an agent on another host: sends orders as messages, and reports the agent's messages as events."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Mapping, Sequence

from horovod._base.version import VERSION
from horovod.runner.agent.base import Agent, HostFacts, Report
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
    NotStarted,
    Prepare,
    ProcessPlan,
    Refused,
    Signal,
    StartProcesses,
    decode_event,
    encode,
)
from horovod.runner.agent.stream import MessageStream
from horovod.runner.event_loop import Loop

_ERROR_BYTES = 1 << 14


class AgentConnection(ABC):
    """A byte stream to an agent on another host, and the errors of the program that provides the stream.

    Attributes:
        reader, writer: descriptors, which the user of the connection closes.
        errors: standard error of the transport and the agent. The connection closes it.
    """

    reader: int
    writer: int
    errors: int

    @abstractmethod
    def explain(self, errors: str, preamble: str) -> str:
        """Why the stream has ended, for the user.

        Args:
            errors: the end of the text from the descriptor ``errors``.
            preamble: the output before the agent's greeting; "" once the greeting has come.
        """

    @abstractmethod
    def close(self, *, orderly: bool) -> None:
        """Close the connection. The agent then ends its processes by itself.

        Args:
            orderly: whether the agent has reported that it ends, which may take a moment.
        """


class RemoteAgent(Agent):
    """An agent behind a connection.

    Args:
        host: its name.
        loop: calls this object when something arrives.
        report: called with each event.
        connection: the stream to the agent.
        begin: the first order. It is sent after the agent's greeting, so that no login shell gets the job's secret.
    """

    def __init__(self, host: str, loop: Loop, report: Report, connection: AgentConnection, begin: Prepare) -> None:
        super().__init__((host,))
        self._loop = loop
        self._report = report
        self._connection = connection
        self._begin = begin
        self._hello: Hello | None = None
        self._errors: deque[bytes] = deque(maxlen=8)
        self._orderly = False
        self._released = False
        self._stream = MessageStream(
            loop, connection.reader, connection.writer, decode_event, self._on_event, self._on_end, greeting=GREETING
        )
        os.set_blocking(connection.errors, False)
        loop.watch(connection.errors, self._read_errors)

    def start(self, environment: Mapping[str, str], plans: Sequence[ProcessPlan]) -> None:
        self._order(StartProcesses(dict(environment), list(plans)))

    def signal(self, number: int, processes: Collection[int]) -> None:
        self._order(Signal(number, list(processes)))

    def look(self) -> None:
        self._order(Look())

    def feed(self, process: int, data: bytes) -> None:
        self._order(Input(process, data))

    def end(self, grace: float, *, hunt: bool) -> None:
        if self.facts is None:
            self.kill()
        else:
            self._order(End(grace, hunt))

    def kill(self) -> None:
        if not self.closed:
            self.unheard = self.facts is not None
            self._close()
        if not self._released:  # last, because closing may wait: with many hosts, most connections have ended by then
            self._released = True
            self._connection.close(orderly=self._orderly)

    def _order(self, order: AgentOrder) -> None:
        self._stream.send(encode(order))

    def _on_event(self, event: AgentEvent) -> None:
        if isinstance(event, Hello):
            self._hello = event
            while self._read_errors():
                pass
            self._errors.clear()  # text that the transport and the host print at login is not an error
            if event.version != VERSION:
                self._refuse(
                    f"it has version {event.version} of Horovod ({event.python}), and the launcher {VERSION}: "
                    "install the same on both"
                )
            else:
                self._order(self._begin)
        elif isinstance(event, AgentReady) and self._hello is not None:
            hello = self._hello
            self.facts = HostFacts(hello.python, hello.cores, hello.interfaces, event.rendezvous)
            self._report(self, event)
        elif isinstance(event, Refused):
            self._refuse(event.reason)
        elif isinstance(event, Lost):
            self._lose(event.reason)
        elif isinstance(event, NotStarted):
            self._report(self, NotStarted(event.process, f"host {self.name}: {event.reason}"))
        elif self.facts is not None:
            if isinstance(event, Closed):
                self._orderly = True
                self._close()
            self._report(self, event)

    def _refuse(self, reason: str) -> None:
        self.trouble = reason
        self._close()
        self._report(self, Refused(reason))

    def _on_end(self, reason: str) -> None:
        while self._read_errors():
            pass
        errors = b"".join(self._errors).decode("utf-8", "replace")
        said = "" if self._hello is not None else self._stream.preamble.decode("utf-8", "replace")
        self._lose(self._connection.explain(errors, said) or reason)

    def _lose(self, reason: str) -> None:
        if self.facts is None:
            self._refuse(reason)
            return
        self.unheard = True
        self.trouble = reason
        self._close()
        self._report(self, Lost(f"the agent of {self.name} is lost: {reason}"))

    def _read_errors(self) -> bool:
        try:
            data = os.read(self._connection.errors, _ERROR_BYTES // 8)
        except BlockingIOError:
            return False
        if not data:
            if self._loop.watches(self._connection.errors):
                self._loop.unwatch(self._connection.errors)
            return False
        self._errors.append(data)
        return True

    def _close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._stream.close()
        if self._loop.watches(self._connection.errors):
            self._loop.unwatch(self._connection.errors)
