"""The place where the ranks of a job meet. One thread serves everybody from one selector loop."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from horovod.control.channel import Channel, ChannelClosed
from horovod.control.listener import Listener
from horovod.control.rendezvous import (
    PURPOSE,
    VALUE_LIMIT,
    Answer,
    Exchange,
    Get,
    Put,
    Refusal,
    Request,
    Values,
    decode_request,
    encode,
)
from horovod.control.rendezvous_group import RendezvousGroup, abandonment, contradicting, disagreement, lateness
from horovod.control.wakeup import WakeUp

_LONGEST_SLEEP = 86400.0
"""Seconds; epoll takes no more than 24 days, and a client may ask for any number."""


@dataclass
class _Refused:
    """A gathering that was refused, for ranks that have not heard of it: they may come later, until the deadline."""

    refusal: Refusal
    deadline: float
    unaware: set[int]


class RendezvousServer:
    """The store. ``start()`` it, hand its ``address`` and the secret to the ranks, ``stop()`` it at the end.

    Args:
        secret: the job's secret; with ``same_user`` on a Unix socket the other side's user id is checked as well.
        host, port: where to listen; port 0 lets the kernel choose.
        name: listen on this Unix socket name instead (an abstract one starts with NUL).
        preface: what everybody who connects is sent before the handshake; strangers see it, too.
    """

    def __init__(
        self,
        secret: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        name: str = "",
        same_user: bool = False,
        preface: bytes = b"",
    ) -> None:
        self._secret = secret
        self._preface = preface
        self._same_user = same_user
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[tuple[Channel, float]]] = {}
        self._rendezvous_groups: dict[str, RendezvousGroup] = {}
        self._refused: dict[str, _Refused] = {}
        self._departed: dict[int, str] = {}
        self._awaited: tuple[int, str] | None = None
        self._passed_on: dict[str, Callable[[str, bytes], None]] = {}
        self._over = (0, "")
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
        """Wait until all guests but one have closed their connection, at most until ``deadline`` (``time.monotonic``)."""
        with self._lock:
            self._arrived.wait_for(lambda: len(self._guests) <= 1, max(0.0, deadline - time.monotonic()))

    def put(self, key: str, value: bytes) -> None:
        """Store a value from the server's own process."""
        with self._lock:
            self._values[key] = value
            self._arrived.notify_all()
        self._wake_up.set()  # the loop answers those who wait for it

    def forget(self, key: str) -> None:
        """Store a value no longer. Harmless if there is none."""
        with self._lock:
            self._values.pop(key, None)

    def pass_on(self, prefix: str, listener: Callable[[str, bytes], None]) -> None:
        """Store no values whose keys begin with ``prefix``: call ``listener(key, value)`` with them, on the server's thread.

        Called before :meth:`start`.
        """
        self._passed_on[prefix] = listener

    def end_rounds(self, number: int, reason: str) -> None:
        """Nobody meets any more in rounds of an elastic job up to ``number``: who does, now or later, is told ``reason``."""
        with self._lock:
            self._over = (number, reason)
        self._wake_up.set()

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

    def depart(self, rank: int, how: str) -> None:
        """Rank ``rank`` of the launched job has ended: whoever waits for it, now or later, is told at once.

        Args:
            how: for people, as in "exit code 0".
        """
        with self._lock:
            self._departed[rank] = how
        self._wake_up.set()

    def awaited_in_vain(self) -> tuple[int, str] | None:
        """The first rank that had departed when others waited for it, and what happened; None if there is none."""
        with self._lock:
            return self._awaited

    # Everything below runs on the server's thread.

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            selector.register(self._wake_up, selectors.EVENT_READ, lambda _: self._wake_up.clear())
            listener = Listener(selector, [self._listener], self._secret, self._welcome, self._same_user, self._preface)
            while not self._stopping:
                for key, events in selector.select(self._sleep(listener.next_deadline())):
                    key.data(events)
                listener.expire()
                self._answer_waiting()
                self._refuse_abandoned()
                self._refuse_over()
                self._expire()
            listener.close()
            self._listener.close()
            for guest in list(self._guests):
                self._dismiss(guest)

    def _sleep(self, reception_deadline: float | None) -> float | None:
        deadlines = [deadline for queue in self._waiting.values() for _, deadline in queue]
        deadlines += [group.deadline for group in self._rendezvous_groups.values()]
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
                    self._handle(guest, decode_request(message))
        except (ChannelClosed, msgspec.DecodeError):
            self._dismiss(guest)

    def _handle(self, guest: Channel, request: Request) -> None:
        if isinstance(request, Put):
            listener = next((each for prefix, each in self._passed_on.items() if request.key.startswith(prefix)), None)
            if listener is not None:
                listener(request.key, request.value)
                self._answer(guest, Values([]))
                return
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
        if self._was_refused(guest, request):
            return
        if 0 < request.round <= self._over[0]:
            self._answer(guest, Refusal(self._over[1], False))
            return
        if len(request.members) not in (0, request.size):
            self._answer(guest, Refusal(f"{len(request.members)} members for {request.size} ranks", False))
            return
        group = self._rendezvous_groups.get(request.key)
        if group is None:
            deadline = time.monotonic() + request.seconds
            group = RendezvousGroup(request.size, deadline, request.seconds, request.members, request.round)
            self._rendezvous_groups[request.key] = group
        if request.size != group.size or not 0 <= request.rank < group.size:
            reason = (
                f"rank {request.rank} says the job has {request.size} ranks, others say {group.size}; "
                "start all ranks with the same size"
            )
            self._answer(guest, Refusal(reason, False))
            return
        if request.rank in group.values:
            reason = (
                f"two processes say they are rank {group.launched(request.rank)}; is the job started twice with one "
                "rendezvous address?"
            )
            self._answer(guest, Refusal(reason, False))
            return
        group.values[request.rank] = request.value
        group.guests[request.rank] = guest
        if len(group.values) == group.size:
            del self._rendezvous_groups[request.key]
            answer = Values([group.values[rank] for rank in range(group.size)])
            for waiting in list(group.guests.values()):
                self._answer(waiting, answer)
        elif len(self._rendezvous_groups) > 1:
            self._refuse_contradictions(request.key)

    def _refuse_contradictions(self, key: str) -> None:
        """End gatherings that wait for one another's guests, which would be in vain: their ranks contradict each other."""
        names = contradicting(self._rendezvous_groups, key)
        ended = [self._rendezvous_groups.pop(name) for name in names]
        refusal = Refusal(disagreement(ended), False)
        aware = {rank for group in ended for rank in group.present()}
        for name, group in zip(names, ended, strict=True):
            if unaware := set(group.missing()) - aware:
                self._refused[name] = _Refused(refusal, group.deadline, unaware)
            for waiting in list(group.guests.values()):
                self._answer(waiting, refusal)

    def _was_refused(self, guest: Channel, request: Exchange) -> bool:
        """Whether this is a rank whose gathering was refused before it came; it is told once."""
        refused = self._refused.get(request.key)
        rank = request.members[request.rank] if 0 <= request.rank < len(request.members) else request.rank
        if refused is None or rank not in refused.unaware or time.monotonic() >= refused.deadline:
            return False
        refused.unaware.discard(rank)
        self._answer(guest, refused.refusal)
        return True

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
                self._keep_waiting(key, [(guest, deadline) for guest, deadline in queue if deadline > now])
                for guest in late:
                    self._answer(guest, Refusal(f"nobody delivered {key!r} in time", True))
        self._refused = {key: refused for key, refused in self._refused.items() if refused.deadline > now}
        for key, group in list(self._rendezvous_groups.items()):
            if group.deadline <= now:
                del self._rendezvous_groups[key]
                reason = lateness(group, self._rendezvous_groups.values())
                for guest in list(group.guests.values()):
                    self._answer(guest, Refusal(reason, True))

    def _refuse_abandoned(self) -> None:
        """End gatherings that wait for ranks that have departed."""
        with self._lock:
            departed = dict(self._departed) if self._rendezvous_groups else {}
        for key, group in list(self._rendezvous_groups.items()):
            missing = {rank: how for rank, how in departed.items() if group.awaits(rank)}
            if not missing:
                continue
            del self._rendezvous_groups[key]
            told, reason = abandonment(group, missing)
            with self._lock:
                self._awaited = self._awaited or (next(iter(missing)), reason)
            for waiting in list(group.guests.values()):
                self._answer(waiting, Refusal(told, False))

    def _refuse_over(self) -> None:
        """End gatherings of rounds that are over."""
        with self._lock:
            number, reason = self._over
        for key, group in list(self._rendezvous_groups.items()):
            if 0 < group.round <= number:
                del self._rendezvous_groups[key]
                for waiting in list(group.guests.values()):
                    self._answer(waiting, Refusal(reason, False))

    def _keep_waiting(self, key: str, queue: list[tuple[Channel, float]]) -> None:
        if queue:
            self._waiting[key] = queue
        else:
            del self._waiting[key]

    def _answer(self, guest: Channel, answer: Answer) -> None:
        if guest not in self._guests:
            return
        try:
            guest.send(encode(answer))
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
            self._keep_waiting(key, [(waiting, deadline) for waiting, deadline in queue if waiting is not guest])
        for key, group in list(self._rendezvous_groups.items()):
            left = [group.launched(rank) for rank, waiting in group.guests.items() if waiting is guest]
            if left and not self._stopping:
                del self._rendezvous_groups[key]
                for waiting in list(group.guests.values()):
                    self._answer(waiting, Refusal(f"rank {left[0]} left while the ranks were meeting in init()", False))
