"""The all-gathers of a rendezvous server: each is open until all of its ranks have come, or it fails.

The server calls most methods on its thread. Those under "Any thread" say what happens outside of the rendezvous.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from horovod._base.running_time import TURN_SECONDS
from horovod.control.channel import Channel
from horovod.control.fd_limit import DescriptorLimitError, make_room
from horovod.control.lost_rank import text_of_loss
from horovod.control.rendezvous.messages import REACHABILITY, ExchangeValues, Refusal, encode, encode_values
from horovod.control.rendezvous.rendezvous_group import (
    FailedExchange,
    RendezvousGroup,
    ended_processes_error,
    timeout_error,
)
from horovod.control.sealing import Message


class OpenExchanges:
    """The exchanges of one server, by their keys.

    Args:
        send: sends a message to a client. It may call :meth:`lose`.
        completed: called with the clients of an exchange that is complete, before they get the values.
    """

    def __init__(
        self, send: Callable[[Channel, Message], None], completed: Callable[[Collection[Channel]], None]
    ) -> None:
        self._send = send
        self._completed = completed
        self._groups: dict[str, RendezvousGroup] = {}
        self._lock = threading.Lock()  # of the next three
        self._departed: dict[int, str] = {}
        self._failed: dict[str, FailedExchange] = {}
        self._over = (0, "")

    # Any thread

    def depart(self, rank: int, ending: str) -> None:
        """Record that rank ``rank`` of the launched job has ended, with the text ``ending``."""
        with self._lock:
            self._departed[rank] = ending

    def end_rounds(self, number: int, reason: str) -> None:
        """Refuse exchanges in rounds of an elastic job up to ``number``, now and later; the error is ``reason``."""
        with self._lock:
            self._over = (number, reason)

    def awaited_in_vain(self) -> tuple[int, str] | None:
        """The rank for which others waited until they failed, with the reason; None if there is none. Exchanges that were
        repeated with success do not count."""
        with self._lock:
            return next(((failed.lost, failed.why) for failed in self._failed.values() if failed.lost >= 0), None)

    def arrived(self) -> dict[str, list[int]]:
        """By the key of each exchange, the ranks that wait for the others."""
        return {key: sorted(group.values) for key, group in list(self._groups.items())}

    # The server's thread

    def sleep_limits(self, now: float) -> list[float]:
        """For each exchange, until when the server may sleep (``time.monotonic``)."""
        return [now + min(group.left(now), TURN_SECONDS) for group in self._groups.values()]

    def add(self, client: Channel, request: ExchangeValues, connected: int) -> None:
        """Add the value of one rank. The last one completes the exchange.

        Args:
            connected: how many clients the server has.
        """
        refusal = self._objection(request, connected)
        if refusal:
            self._refuse([client], refusal)
            return
        group = self._groups[request.key]
        group.values[request.rank] = request.value
        group.clients[request.rank] = client
        if len(group.values) == group.size:
            del self._groups[request.key]
            with self._lock:
                self._failed.pop(request.key, None)
            self._completed(group.clients.values())
            answer = Message(encode_values([group.values[rank] for rank in range(group.size)]))
            for waiting in list(group.clients.values()):
                self._send(waiting, answer)

    def _objection(self, request: ExchangeValues, connected: int) -> str:
        """Why a rank must not take part; "" if it may. Opens its exchange if it is the first."""
        with self._lock:
            number, reason = self._over
        if 0 < request.round <= number:
            return reason
        if len(request.members) not in (0, request.size):
            return f"{len(request.members)} members for {request.size} ranks"
        group = self._groups.get(request.key)
        if group is None:
            try:
                make_room(max(0, request.size - connected), f"a rendezvous of {request.size} ranks")
            except DescriptorLimitError as error:
                return str(error)
            deadline = time.monotonic() + request.seconds
            group = RendezvousGroup(request.size, deadline, request.seconds, request.members, request.round)
            self._groups[request.key] = group
        if request.size != group.size or not 0 <= request.rank < group.size:
            return (
                f"rank {request.rank} says the job has {request.size} ranks, others say {group.size}; "
                "start all ranks with the same size"
            )
        if request.rank in group.values:
            return (
                f"two processes say they are rank {group.launched(request.rank)}; is the job started twice with one "
                "rendezvous address?"
            )
        return ""

    def end_failed(self) -> None:
        """End the exchanges that cannot complete any more."""
        self._end_abandoned()
        self._end_over()
        now, groups = time.monotonic(), self._groups
        reasons = {key: timeout_error(group, groups.values()) for key, group in groups.items() if group.left(now) <= 0}
        for key, reason in reasons.items():
            self._fail(key, groups[key].missing()[0], reason, reason, timed_out=True)

    def lose(self, client: Channel) -> None:
        """End the exchanges in which a client waited that has disconnected."""
        for key, group in list(self._groups.items()):
            left = [group.launched(rank) for rank, waiting in group.clients.items() if waiting is client]
            if left:
                why = text_of_loss(left[0], "the other ranks waited for it in init()", "it closed its connection")
                self._fail(key, left[0], why, why)

    def _end_abandoned(self) -> None:
        """End the exchanges that wait for ranks that have ended."""
        with self._lock:
            departed = dict(self._departed) if self._groups else {}
        for key, group in list(self._groups.items()):
            missing = {rank: ending for rank, ending in departed.items() if group.awaits(rank)}
            earlier = self._failed.get(key)
            if missing and earlier is not None and {earlier.lost, *earlier.heard} & missing.keys():
                # It has failed for these ranks, too; or they had come, and have ended because of that.
                self._fail(key, earlier.lost, earlier.error, earlier.why, earlier.heard)
            elif missing:
                error, why = ended_processes_error(group, missing, in_the_middle=key.startswith(f"{REACHABILITY}/"))
                self._fail(key, next(iter(missing)), error, why)

    def _end_over(self) -> None:
        """End the exchanges of rounds that are over."""
        with self._lock:
            number, reason = self._over
        for key, group in list(self._groups.items()):
            if 0 < group.round <= number:
                del self._groups[key]
                self._refuse(group.clients.values(), reason)

    def _fail(
        self, key: str, lost: int, error: str, why: str, heard: Collection[int] = (), timed_out: bool = False
    ) -> None:
        """End an exchange: all its ranks raise an error.

        Args:
            lost: the rank of the launched job for which they waited.
            error: the text of the error.
            why: why that rank is to blame.
            heard: ranks that got this error before.
        """
        group = self._groups.pop(key)
        with self._lock:
            self._failed[key] = FailedExchange(lost, error, why, {*heard, *group.present()})
        self._refuse(group.clients.values(), error, timed_out)

    def _refuse(self, clients: Collection[Channel], reason: str, timed_out: bool = False) -> None:
        answer = Message(encode(Refusal(reason, timed_out)))
        for client in list(clients):
            self._send(client, answer)
