"""Where the ranks of a job meet: a small authenticated store, and an all-gather of address cards.

The launcher runs one server for the life of the job; under launchers that give no place to meet, rank 0 runs one for the
moments of ``init()``. One thread serves everybody from one selector loop. Values are opaque bytes.

``exchange`` is what ``init()`` needs: every rank brings its value, all get all values, and the server forgets them, so
that any number of init/shutdown cycles leaves nothing behind.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field

import msgspec

from horovod.control.channel import Channel, ChannelClosed
from horovod.control.dial import Address, dial_until, receive_exactly
from horovod.control.framing import LENGTH_BYTES, frame
from horovod.control.reception import Reception

VALUE_LIMIT = (1 << 32) - 1
PURPOSE = b"rendezvous"
_LONGEST_SLEEP = 86400.0
"""Seconds; epoll takes no more than 24 days, and a client may ask for any number."""


class Put(msgspec.Struct, tag=True):
    """Store a value."""

    key: str
    value: bytes
    only_first: bool = False


class Get(msgspec.Struct, tag=True):
    """Wait for a value, at most ``seconds``."""

    key: str
    seconds: float


class Exchange(msgspec.Struct, tag=True):
    """Bring rank ``rank``'s value to the exchange ``key`` of ``size`` ranks; the answer is everybody's."""

    key: str
    rank: int
    size: int
    value: bytes
    seconds: float


class Values(msgspec.Struct, tag=True):
    """The answer: one value for a Get, one a rank for an Exchange, none for a Put."""

    values: list[bytes]


class Refusal(msgspec.Struct, tag=True):
    """The answer when there is none to give in time, or the question was wrong."""

    reason: str
    timed_out: bool


_requests = msgspec.msgpack.Decoder(Put | Get | Exchange)
_answers = msgspec.msgpack.Decoder(Values | Refusal)
_encode = msgspec.msgpack.Encoder().encode


class RendezvousError(RuntimeError):
    """The ranks could not meet; the message says who was missing or what was wrong."""


@dataclass
class _Gathering:
    size: int
    deadline: float
    seconds: float
    values: dict[int, bytes] = field(default_factory=dict)
    guests: dict[int, Channel] = field(default_factory=dict)


class RendezvousServer:
    """The store. ``start()`` it, hand its ``address`` and the secret to the ranks, ``stop()`` it at the end.

    Args:
        secret: the job's secret; with ``same_user`` on a Unix socket the other side's user id is checked as well.
        host, port: where to listen; port 0 lets the kernel choose.
        name: listen on this Unix socket name instead (an abstract one starts with NUL).
    """

    def __init__(
        self, secret: bytes, host: str = "127.0.0.1", port: int = 0, *, name: str = "", same_user: bool = False
    ) -> None:
        self._secret = secret
        self._same_user = same_user
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[tuple[Channel, float]]] = {}
        self._gatherings: dict[str, _Gathering] = {}
        self._guests: set[Channel] = set()
        if name:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        else:
            self._listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind(name or (host, port))
            self._listener.listen(1024)
        except OSError:
            self._listener.close()
            raise
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
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
        self._wake()
        if self._thread.ident is not None:
            self._thread.join()
        else:
            self._listener.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def wait_until_left(self, deadline: float) -> None:
        """Wait until all guests but one have closed their connection, at most until ``deadline`` (``time.monotonic``)."""
        with self._lock:
            self._arrived.wait_for(lambda: len(self._guests) <= 1, max(0.0, deadline - time.monotonic()))

    def put(self, key: str, value: bytes) -> None:
        """Store a value from the server's own process."""
        with self._lock:
            self._values[key] = value
            self._arrived.notify_all()
        self._wake()  # the loop answers those who wait for it

    def peek(self, key: str) -> bytes | None:
        """The value of a key, or None."""
        with self._lock:
            return self._values.get(key)

    def get(self, key: str, timeout: float) -> bytes:
        """Wait for a value in the server's own process.

        Raises:
            TimeoutError: it did not come within ``timeout`` seconds.
        """
        with self._lock:
            if not self._arrived.wait_for(lambda: key in self._values, timeout):
                raise TimeoutError(f"no rank delivered {key!r} within {timeout:g} seconds")
            return self._values[key]

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"x")
        except BlockingIOError:
            pass  # so many wake-ups are under way that this one is not needed

    # Everything below runs on the server's thread.

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            selector.register(self._wake_read, selectors.EVENT_READ, lambda _: os.read(self._wake_read, 4096))
            reception = Reception(selector, [self._listener], self._secret, self._welcome, self._same_user)
            while not self._stopping:
                for key, events in selector.select(self._sleep(reception.next_deadline())):
                    key.data(events)
                reception.expire()
                self._answer_waiting()
                self._expire()
            reception.close()
            self._listener.close()
            for guest in list(self._guests):
                self._dismiss(guest)

    def _sleep(self, reception_deadline: float | None) -> float | None:
        deadlines = [deadline for queue in self._waiting.values() for _, deadline in queue]
        deadlines += [gathering.deadline for gathering in self._gatherings.values()]
        if reception_deadline is not None:
            deadlines.append(reception_deadline)
        return min(max(0.0, min(deadlines) - time.monotonic()), _LONGEST_SLEEP) if deadlines else None

    def _welcome(self, connection: socket.socket, purpose: bytes, rest: bytes) -> None:
        if purpose != PURPOSE or rest:
            connection.close()
            return
        guest = Channel(connection, VALUE_LIMIT)
        self._guests.add(guest)
        self._selector.register(guest, selectors.EVENT_READ, lambda events: self._serve_guest(guest, events))

    def _serve_guest(self, guest: Channel, events: int) -> None:
        if guest not in self._guests:
            return  # dismissed by another event of the same moment
        try:
            if events & selectors.EVENT_WRITE:
                guest.flush()
                if not guest.wants_write:
                    self._selector.modify(guest, selectors.EVENT_READ, self._selector.get_key(guest).data)
            if events & selectors.EVENT_READ:
                for message in guest.receive():
                    self._handle(guest, _requests.decode(message))
        except (ChannelClosed, msgspec.DecodeError):
            self._dismiss(guest)

    def _handle(self, guest: Channel, request: Put | Get | Exchange) -> None:
        if isinstance(request, Put):
            with self._lock:
                if not (request.only_first and request.key in self._values):
                    self._values[request.key] = request.value
                    self._arrived.notify_all()
            self._answer(guest, Values([]))
        elif isinstance(request, Get):
            self._waiting.setdefault(request.key, []).append((guest, time.monotonic() + request.seconds))
        else:
            self._gather(guest, request)

    def _gather(self, guest: Channel, request: Exchange) -> None:
        gathering = self._gatherings.get(request.key)
        if gathering is None:
            gathering = _Gathering(request.size, time.monotonic() + request.seconds, request.seconds)
            self._gatherings[request.key] = gathering
        if request.size != gathering.size or not 0 <= request.rank < gathering.size:
            reason = (
                f"rank {request.rank} says the job has {request.size} ranks, others say {gathering.size}; "
                "start all ranks with the same size"
            )
            self._answer(guest, Refusal(reason, False))
            return
        if request.rank in gathering.values:
            reason = (
                f"two processes say they are rank {request.rank}; is the job started twice with one rendezvous address?"
            )
            self._answer(guest, Refusal(reason, False))
            return
        gathering.values[request.rank] = request.value
        gathering.guests[request.rank] = guest
        if len(gathering.values) == gathering.size:
            del self._gatherings[request.key]
            answer = Values([gathering.values[rank] for rank in range(gathering.size)])
            for waiting in list(gathering.guests.values()):
                self._answer(waiting, answer)

    def _answer_waiting(self) -> None:
        with self._lock:
            found = {key: self._values[key] for key in self._waiting if key in self._values}
        for key, value in found.items():
            for guest, _ in self._waiting.pop(key):
                self._answer(guest, Values([value]))

    def _expire(self) -> None:
        now = time.monotonic()
        for key, queue in list(self._waiting.items()):
            late = [guest for guest, deadline in queue if deadline <= now]
            if late:
                self._waiting[key] = [(guest, deadline) for guest, deadline in queue if deadline > now]
                for guest in late:
                    self._answer(guest, Refusal(f"nobody delivered {key!r} in time", True))
        for key, gathering in list(self._gatherings.items()):
            if gathering.deadline <= now:
                del self._gatherings[key]
                missing = [rank for rank in range(gathering.size) if rank not in gathering.values]
                for guest in list(gathering.guests.values()):
                    self._answer(guest, Refusal(_missing(missing, gathering), True))

    def _answer(self, guest: Channel, answer: Values | Refusal) -> None:
        if guest not in self._guests:
            return
        try:
            guest.send(_encode(answer))
        except ChannelClosed:
            self._dismiss(guest)
            return
        if guest.wants_write:
            both = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.modify(guest, both, self._selector.get_key(guest).data)

    def _dismiss(self, guest: Channel) -> None:
        if guest not in self._guests:
            return
        with self._lock:
            self._guests.discard(guest)
            self._arrived.notify_all()
        self._selector.unregister(guest)
        guest.close()
        for key, queue in list(self._waiting.items()):
            self._waiting[key] = [(waiting, deadline) for waiting, deadline in queue if waiting is not guest]
        for key, gathering in list(self._gatherings.items()):
            left = [rank for rank, waiting in gathering.guests.items() if waiting is guest]
            if left and not self._stopping:
                del self._gatherings[key]
                for waiting in list(gathering.guests.values()):
                    self._answer(waiting, Refusal(f"rank {left[0]} left while the ranks were meeting in init()", False))


def _missing(missing: list[int], gathering: _Gathering) -> str:
    shown = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
    return (
        f"rank{'s' if len(missing) > 1 else ''} {shown} of {gathering.size} did not call hvd.init() within "
        f"{gathering.seconds:.3g} seconds of the first rank. Look at the output of those ranks; if they only need more "
        "time to start, raise horovodrun --start-timeout (HOROVOD_START_TIMEOUT)"
    )


class RendezvousClient:
    """One rank's connection to the server; a context manager. For one thread at a time.

    Raises:
        RendezvousError: the server could not be reached within ``timeout`` seconds.
    """

    def __init__(self, address: Address, secret: bytes, timeout: float, same_user: bool = False) -> None:
        try:
            self._connection = dial_until([address], secret, PURPOSE, time.monotonic() + timeout, same_user)
        except ConnectionError as error:
            raise RendezvousError(f"the place where the ranks of this job meet: {error}") from error

    def put(self, key: str, value: bytes, *, only_first: bool = False, timeout: float = 60.0) -> None:
        """Store a value; with ``only_first`` an earlier value stays.

        Raises:
            RendezvousError: the server is gone, or took longer than ``timeout`` seconds.
        """
        self._ask(Put(key, value, only_first), timeout, slack=0.0)

    def get(self, key: str, timeout: float) -> bytes:
        """Wait for a value.

        Raises:
            TimeoutError: it was not there within ``timeout`` seconds.
        """
        return self._ask(Get(key, timeout), timeout)[0]

    def exchange(self, key: str, rank: int, size: int, value: bytes, timeout: float) -> list[bytes]:
        """All-gather ``value`` under ``key``: every one of ``size`` ranks must call it. Returns the values by rank.

        Raises:
            TimeoutError: somebody did not come; the message says who.
            RendezvousError: somebody left, or two processes claim one rank.
        """
        return self._ask(Exchange(key, rank, size, value, timeout), timeout)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> RendezvousClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: Put | Get | Exchange, seconds: float, slack: float = 10.0) -> list[bytes]:
        """Ask and wait; for ``slack`` seconds longer than the server, which says itself that the time is over."""
        deadline = time.monotonic() + seconds + slack
        try:
            self._connection.settimeout(seconds + slack)
            self._connection.sendall(frame(_encode(request)))
            length = int.from_bytes(receive_exactly(self._connection, LENGTH_BYTES, deadline), "big")
            body = receive_exactly(self._connection, length, deadline + (60.0 if slack else 0.0))  # it may be large
        except OSError as error:
            raise RendezvousError(f"the place where the ranks of this job meet is gone: {error}") from error
        answer: Values | Refusal = _answers.decode(body)
        if isinstance(answer, Refusal):
            raise TimeoutError(answer.reason) if answer.timed_out else RendezvousError(answer.reason)
        return answer.values
