"""The rendezvous server: a key-value store, and the all-gather for ``init()``. One thread serves all clients."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection

import msgspec

from horovod._base.running_time import running_time
from horovod.control.channel import Channel, ChannelClosed
from horovod.control.connection import Connection
from horovod.control.dial import listening_socket
from horovod.control.listener import LARGEST_QUEUE, ConnectionListener
from horovod.control.rendezvous.messages import (
    PURPOSE,
    VALUE_LIMIT,
    Answer,
    ExchangeValues,
    Get,
    Put,
    Refusal,
    Request,
    Values,
    decode_request,
    encode,
)
from horovod.control.rendezvous.open_exchanges import OpenExchanges
from horovod.control.rendezvous.store_requests import carry_out
from horovod.control.sealing import Message
from horovod.control.wakeup import WakeUp

_log = logging.getLogger("horovod.control")

_LONGEST_SLEEP = 86400.0
"""The longest wait in seconds. epoll accepts at most 24 days, and a client may ask for any number."""


class RendezvousServer:
    """The server. ``start()`` it, pass its ``address`` and the secret to the ranks, ``stop()`` it at the end.

    Args:
        secret: the job's secret.
        host, port: where to listen; port 0 lets the kernel choose.
        name: listen on this Unix socket instead; an abstract name starts with NUL.
        preface: sent to every client before the handshake, even to one without the secret.
        expected: how many clients may come from one address at a time, if that is known (:class:`ConnectionListener`).

    Attributes:
        exchanges: the all-gathers that are not complete.
    """

    def __init__(
        self,
        secret: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        name: str = "",
        preface: bytes = b"",
        expected: int = LARGEST_QUEUE,
    ) -> None:
        self._secret = secret
        self._preface = preface
        self._expected = expected
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[tuple[Channel, float]]] = {}
        self.exchanges = OpenExchanges(self._send, self._note_exchanged)
        self._passed_on: dict[str, Callable[[str, bytes], None]] = {}
        self._clients: set[Channel] = set()
        self._exchanged: set[Channel] = set()
        """The clients that have completed an exchange, as long as they are connected."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) if name else listening_socket(host, port)
        try:
            if name:
                self._listener.bind(name)
            self._listener.listen(1024)
        except OSError:
            self._listener.close()
            raise
        self._wake_up = WakeUp()
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="horovod-rendezvous", daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        """``(host, port)`` of the TCP listener."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close every connection. Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        self._wake_up.set()
        if self._thread.ident is not None:
            self._thread.join()
        else:
            self._listener.close()
        self._wake_up.close()

    def wait_until_left(self, deadline: float) -> None:
        """Wait until all but one of the clients that have completed an exchange have disconnected, or until ``deadline``
        (``time.monotonic``).

        A rank may have connected again, for its next rendezvous, before the caller checks. The caller does not wait for such a
        connection: that rank looks for the next server.
        """
        with self._lock:
            self._arrived.wait_for(lambda: len(self._exchanged) <= 1, max(0.0, deadline - time.monotonic()))

    def put(self, key: str, value: bytes) -> None:
        """Store a value from the server's own process."""
        with self._lock:
            self._values[key] = value
            self._arrived.notify_all()
        self._wake_up.set()  # so that the loop answers the clients that wait for the key

    def forget(self, key: str) -> None:
        """Delete a value, if there is one."""
        with self._lock:
            self._values.pop(key, None)

    def forget_all(self, prefix: str) -> None:
        """Delete the values whose keys begin with ``prefix``."""
        with self._lock:
            for key in [key for key in self._values if key.startswith(prefix)]:
                del self._values[key]

    def pass_on(self, prefix: str, listener: Callable[[str, bytes], None]) -> None:
        """Pass values whose keys begin with ``prefix`` to ``listener(key, value)``, on the server's thread, without storing
        them.

        Called before :meth:`start`.
        """
        self._passed_on[prefix] = listener

    def end_rounds(self, number: int, reason: str) -> None:
        """Refuse exchanges in rounds of an elastic job up to ``number``, now and later; the error is ``reason``."""
        self.exchanges.end_rounds(number, reason)
        self._wake_up.set()

    def peek(self, key: str) -> bytes | None:
        """The value of a key, or None."""
        with self._lock:
            return self._values.get(key)

    def get(self, key: str, timeout: float) -> bytes:
        """Wait for a value in the server's own process.

        Raises:
            TimeoutError: no rank stored it within ``timeout`` seconds.
        """
        with self._lock:
            if not self._arrived.wait_for(lambda: key in self._values, timeout):
                raise TimeoutError(f"no rank delivered {key!r} within {timeout:g} seconds")
            return self._values[key]

    def depart(self, rank: int, ending: str) -> None:
        """Record that rank ``rank`` of the launched job has ended. Ranks that wait for it, now or later, fail at once.

        Args:
            ending: how it ended, as text, for example "exit code 0".
        """
        self.exchanges.depart(rank, ending)
        self._wake_up.set()

    def connected(self) -> int:
        """How many clients are connected."""
        return len(self._clients)

    # Everything below runs on the server's thread.

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            selector.register(self._wake_up, selectors.EVENT_READ, lambda _: self._wake_up.clear())
            listener = ConnectionListener(
                selector, [self._listener], self._secret, self._welcome, self._preface, expected=self._expected
            )
            while not self._stopping:
                sleep = self._sleep_limit(listener.next_deadline())
                planned = time.monotonic() + (_LONGEST_SLEEP if sleep is None else sleep)
                found = selector.select(sleep)
                running_time.turn(planned, time.monotonic())
                for key, events in found:
                    key.data(events)
                listener.expire()
                self._answer_waiting()
                self._expire()
                self.exchanges.end_failed()
            listener.close()
            self._listener.close()
            for client in list(self._clients):
                self._dismiss(client)

    def _sleep_limit(self, handshake_deadline: float | None) -> float | None:
        now = time.monotonic()
        deadlines = [deadline for queue in self._waiting.values() for _, deadline in queue]
        deadlines += self.exchanges.sleep_limits(now)
        if handshake_deadline is not None:
            deadlines.append(handshake_deadline)
        return min(max(0.0, min(deadlines) - now), _LONGEST_SLEEP) if deadlines else None

    def _welcome(self, connection: Connection, purpose: bytes) -> None:
        if purpose != PURPOSE:
            connection.close()
            return
        client = Channel(connection, VALUE_LIMIT)
        self._clients.add(client)
        self._selector.register(client, selectors.EVENT_READ, lambda events: self._serve_client(client, events))

    def _serve_client(self, client: Channel, events: int) -> None:
        if client not in self._clients:
            return  # another event of the same poll has closed it
        try:
            if events & selectors.EVENT_WRITE:
                client.flush()
                if not client.wants_write:
                    self._selector.modify(client, selectors.EVENT_READ, self._selector.get_key(client).data)
            if events & selectors.EVENT_READ:
                for message in client.receive():
                    self._handle(client, decode_request(message))
        except ChannelClosed as error:
            if error.changed:
                _log.error("the rendezvous server disconnects a client: %s", error.network)
            self._dismiss(client)
        except msgspec.DecodeError:
            self._dismiss(client)

    def _handle(self, client: Channel, request: Request) -> None:
        if isinstance(request, Put):
            listener = next((each for prefix, each in self._passed_on.items() if request.key.startswith(prefix)), None)
            if listener is not None:
                listener(request.key, request.value)
                self._answer(client, Values([]))
                return
            with self._lock:
                if not (request.only_first and request.key in self._values):
                    self._values[request.key] = request.value
                    self._arrived.notify_all()
            self._answer(client, Values([]))
        elif isinstance(request, Get):
            self._waiting.setdefault(request.key, []).append((client, time.monotonic() + request.seconds))
        elif isinstance(request, ExchangeValues):
            self.exchanges.add(client, request, len(self._clients))
        else:
            try:
                with self._lock:
                    values = carry_out(request, self._values)
                    self._arrived.notify_all()
            except ValueError as error:
                self._answer(client, Refusal(f"{request}: {error}", False))
                return
            self._answer(client, Values(values))

    def _note_exchanged(self, clients: Collection[Channel]) -> None:
        with self._lock:
            self._exchanged |= self._clients.intersection(clients)

    def _answer_waiting(self) -> None:
        with self._lock:
            found = {key: self._values[key] for key in self._waiting if key in self._values}
        for key, value in found.items():
            for client, _ in self._waiting.pop(key):
                self._answer(client, Values([value]))

    def _expire(self) -> None:
        now = time.monotonic()
        for key, queue in list(self._waiting.items()):
            late = [client for client, deadline in queue if deadline <= now]
            if late:
                self._keep_waiting(key, [(client, deadline) for client, deadline in queue if deadline > now])
                for client in late:
                    self._answer(client, Refusal(f"no rank delivered {key!r} in time", True))

    def _keep_waiting(self, key: str, queue: list[tuple[Channel, float]]) -> None:
        if queue:
            self._waiting[key] = queue
        else:
            del self._waiting[key]

    def _answer(self, client: Channel, answer: Answer) -> None:
        self._send(client, Message(encode(answer)))

    def _send(self, client: Channel, answer: Message) -> None:
        if client not in self._clients:
            return
        try:
            client.send(answer)
        except ChannelClosed:
            self._dismiss(client)
            return
        if client.wants_write:
            both = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.modify(client, both, self._selector.get_key(client).data)

    def _dismiss(self, client: Channel) -> None:
        if client not in self._clients:
            return
        with self._lock:
            self._clients.discard(client)
            self._exchanged.discard(client)
            self._arrived.notify_all()
        self._selector.unregister(client)
        client.close()
        for key, queue in list(self._waiting.items()):
            self._keep_waiting(key, [(waiting, deadline) for waiting, deadline in queue if waiting is not client])
        if not self._stopping:
            self.exchanges.lose(client)
