"""Turns announcements into ordered decisions, for the coordinator. Pure: no I/O, no locks, no clock of its own.

1. It counts which members have announced each name.
2. When all members that have not joined have announced a name, their requests are compared.
3. The decision joins the ready queue, in the order in which names became complete. All ranks follow that order.

If the requests are the same objects that agreed the last time, they are not compared again. If every member announces in one
message what it announced in one message the last time, they are not even counted one by one (:class:`_Burst`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from horovod.core.negotiation.messages import Decision, Operation, Request
from horovod.core.negotiation.ready_request import NegotiationError, ReadyRequest, decide

_KEYS = 1024
"""How many keys are kept, so that equal keys are the same object and quick to compare."""

_LEAST_BURST = 16
"""The fewest requests in one message that are remembered together."""

_JOIN = Operation.JOIN  # an attribute of an enumeration takes longer to look up than to compare


class IncompleteRequest(NamedTuple):
    """A name that some members have announced and others have not.

    Attributes:
        since: the time its first announcement arrived.
        announced, missing: members' global ranks.
    """

    request: Request
    since: float
    announced: list[int]
    missing: list[int]


class _Tally:
    """The announcements of one name, and what was agreed the last time."""

    __slots__ = ("agreed", "count", "identifier", "ranks", "ready", "requests", "since")

    def __init__(self, ranks: Sequence[int], identifier: int) -> None:
        self.identifier = identifier
        self.ranks = ranks
        self.requests: list[Request | None] = [None] * len(ranks)
        self.count = 0
        self.since = 0.0
        self.agreed: list[Request | None] | None = None
        self.ready: ReadyRequest | None = None


class _Burst(NamedTuple):
    """Many requests that became complete together, each member having announced all of them in one message.

    It holds until a decision is sent in full: then a number may have another meaning.

    Attributes:
        requests: by member, its message.
        ready: the decisions, which the members know by their numbers. The same list is returned each time; it never changes.
        numbers: those numbers.
    """

    requests: dict[int, Sequence[Request]]
    ready: list[ReadyRequest]
    numbers: frozenset[int]


class Negotiator:
    """Coordinates one process set, and requests on device memory that only some of its members take part in.

    Args:
        ranks: the members' global ranks, in set order; arguments named ``member`` are indices into it.
        capacity: names whose decisions are remembered; 0 remembers none.

    Attributes:
        idle: whether no name is incomplete, and no member has joined.
        joined: the requests of the members that have joined, while others have not.
        ready: what :meth:`take` would return.
    """

    def __init__(self, ranks: Sequence[int], capacity: int) -> None:
        self._ranks = list(ranks)
        self._size = len(self._ranks)
        self._capacity = capacity
        self._tallies: dict[str, _Tally] = {}
        self._pending: dict[str, _Tally] = {}  # the incomplete names
        self.idle = True
        self._free: list[int] = list(range(capacity - 1, -1, -1))
        self.joined: dict[int, Request] = {}
        self._last_joined = -1
        self._moved = 0.0
        self.ready: list[ReadyRequest] = []
        self._unsent: set[int] = set()
        self._keys: dict[tuple[object, ...], tuple[object, ...]] = {}
        self._burst: _Burst | None = None
        # When each member has announced the burst again, if nothing else is incomplete.
        self._arrived: dict[int, float] = {}
        # The announcements since nothing was incomplete or ready, up to one more than there are members.
        self._messages: list[tuple[int, Sequence[Request]]] = []

    @property
    def remembered(self) -> int:
        """How many names it remembers, with what was agreed on them the last time or with incomplete announcements."""
        return len(self._tallies)

    def announce(self, member: int, requests: Sequence[Request], now: float) -> None:
        """Take one member's requests.

        Args:
            requests: in one message. The caller does not change it.
            now: the time, for :meth:`waiting`.
        """
        if self._repeats_burst(member, requests, now):
            return
        self._count_one_by_one()
        if self.idle and not self.ready:
            self._messages.clear()
        if len(self._messages) <= self._size:
            self._messages.append((member, requests))
        self._count(member, requests, now)
        if self.idle and len(requests) >= _LEAST_BURST and len(self._messages) == self._size:
            self._remember_burst()

    def _count(self, member: int, requests: Sequence[Request], now: float) -> None:
        tallies, pending = self._tallies, self._pending
        self._moved = now
        for request in requests:
            if request.operation is _JOIN:
                self._join(member, request)
                continue
            name = request.name
            tally = tallies.get(name)
            if tally is None:
                tally = self._remember(request)
            index = member
            if request.members or tally.ranks is not self._ranks:
                index = self._index(member, request, tally)
            if tally.requests[index] is not None:
                raise NegotiationError(f"rank {self._ranks[member]} announced {name!r} twice")
            if tally.count == 0:
                tally.since = now
                pending[name] = tally
            tally.requests[index] = request
            tally.count += 1
            if tally.count == len(tally.requests) or (self.joined and self._complete(tally)):
                self._decide(name, tally)
        self.idle = not pending and not self.joined

    def _repeats_burst(self, member: int, requests: Sequence[Request], now: float) -> bool:
        """Whether a member announces the burst again, and nothing else is incomplete. Then it is counted as a whole."""
        burst, arrived = self._burst, self._arrived
        if burst is None or not (self.idle or arrived) or member in arrived or requests != burst.requests[member]:
            return False
        arrived[member] = self._moved = now
        self.idle = len(arrived) == self._size
        if self.idle:
            arrived.clear()
            self.ready = [*self.ready, *burst.ready] if self.ready else burst.ready
            self._unsent.update(burst.numbers)
        return True

    def _count_one_by_one(self) -> None:
        """Bring the tallies up to date, if some members have announced the burst: something else comes."""
        burst = self._burst
        if burst is None:
            return
        if self.ready is burst.ready:
            self.ready = [*burst.ready]
        arrived, self._arrived = self._arrived, {}
        for member, since in arrived.items():
            self._count(member, burst.requests[member], since)

    def _remember_burst(self) -> None:
        """Remember the last messages, one of each member, if everything that is ready is of them and was decided before."""
        requests, ready = dict(self._messages), self.ready
        if len(requests) < self._size or any(len(each) != len(ready) for each in requests.values()):
            return
        if not any(each.fresh or each.decision.members for each in ready):
            self._burst = _Burst(requests, [*ready], frozenset(each.decision.identifier for each in ready))

    def taking_part(self, members: Sequence[int], request: Request) -> Sequence[int]:
        """The members that take part in a request and have not joined, of these members."""
        if not request.members and not self.joined:
            return members
        ranks = request.members or self._ranks
        return [member for member in members if member not in self.joined and self._ranks[member] in ranks]

    def announce_together(self, members: Sequence[int], request: Request, now: float) -> None:
        """Take the same request of several members.

        The same as :meth:`announce` for one after another. For a range it takes hardly longer than for one member, unless a
        member has joined.
        """
        self._count_one_by_one()
        self._messages[:] = [(-1, ())]  # no message of one member
        name = request.name
        tally = self._tallies.get(name)
        together = not self.joined and isinstance(members, range) and not request.members
        if tally is None and together and request.operation is not _JOIN:
            tally = self._remember(request)
        width = len(members)
        indices = slice(members.start, members.stop, members.step) if isinstance(members, range) else slice(0)
        if not together or tally is None or tally.ranks is not self._ranks or tally.requests[indices] != [None] * width:
            for member in members:  # which finds out what is wrong
                self._count(member, (request,), now)
            return
        self._moved = now
        if tally.count == 0:
            tally.since = now
            self._pending[name] = tally
        tally.requests[indices] = [request] * width
        tally.count += width
        if tally.count == len(tally.requests):
            self._decide(name, tally)
        self.idle = not self._pending and not self.joined

    def _index(self, member: int, request: Request, tally: _Tally) -> int:
        """The index of a member's request in the tally of a request that only some members take part in."""
        rank = self._ranks[member]
        if request.members != tuple(tally.ranks if tally.ranks is not self._ranks else ()) or rank not in tally.ranks:
            raise NegotiationError(f"rank {rank} announced {request.name!r} for other ranks than those before it")
        return tally.ranks.index(rank)

    def take(self) -> list[ReadyRequest]:
        """The decisions made since the last call, in order. The caller sends them before anything is announced again."""
        ready, self.ready = self.ready, []
        self._unsent.clear()
        return ready

    def waiting(self) -> list[IncompleteRequest]:
        """The incomplete names, oldest first.

        Members that have joined are shown as waiting if no name is incomplete: since the last announcement.
        """
        self._count_one_by_one()
        found = []
        for tally in self._pending.values():
            announced = [rank for rank, request in zip(tally.ranks, tally.requests, strict=True) if request is not None]
            missing = [
                rank
                for index, rank in enumerate(tally.ranks)
                if tally.requests[index] is None and not self._excused(tally, index)
            ]
            request = next(request for request in tally.requests if request is not None)
            found.append(IncompleteRequest(request, tally.since, announced, missing))
        if self.joined and not found:
            joined = [self._ranks[member] for member in self.joined]
            missing = [rank for member, rank in enumerate(self._ranks) if member not in self.joined]
            found.append(IncompleteRequest(next(iter(self.joined.values())), self._moved, joined, missing))
        return sorted(found, key=lambda waiting: waiting.since)

    def apart(self) -> list[IncompleteRequest]:
        """The incomplete names, oldest first, if every member that has not joined has announced one of them; else none.

        If nothing else is announced, they stay incomplete forever.
        """
        found = [] if self.idle else self.waiting()
        announced = {rank for waiting in found for rank in waiting.announced}
        everyone = all(rank in announced or member in self.joined for member, rank in enumerate(self._ranks))
        return found if everyone and len(found) > 1 else []

    @property
    def moved(self) -> float:
        """The time of the last announcement."""
        return self._moved

    def oldest(self) -> float | None:
        """Since when the oldest of :meth:`waiting` has been incomplete."""
        default = self._moved if self.joined else None
        return min([*(tally.since for tally in self._pending.values()), *self._arrived.values()], default=default)

    def _remember(self, request: Request) -> _Tally:
        if request.transient or self._capacity == 0:
            tally = _Tally(request.members or self._ranks, -1)
        else:
            if not self._free:
                self._forget_one()
            tally = _Tally(request.members or self._ranks, self._free.pop() if self._free else -1)
        self._tallies[request.name] = tally
        return tally

    def _forget_one(self) -> None:
        """Free the number of the oldest name that is not announced and whose decision has been sent."""
        for name, tally in self._tallies.items():
            if tally.identifier >= 0 and tally.count == 0 and tally.identifier not in self._unsent:
                self._free.append(tally.identifier)
                del self._tallies[name]
                return

    def _join(self, member: int, request: Request) -> None:
        if member in self.joined:
            raise NegotiationError(f"rank {self._ranks[member]} joined twice")
        self.joined[member] = request
        self._last_joined = self._ranks[member]
        for name, tally in list(self._pending.items()):
            if self._complete(tally):
                self._decide(name, tally)
        if len(self.joined) == self._size:
            self.joined = {}
            decision = Decision(-1, request.name, Operation.JOIN, last_joined=self._last_joined)
            self.ready.append(ReadyRequest(decision, None, 0, True))

    def _complete(self, tally: _Tally) -> bool:
        return all(request is not None or self._excused(tally, index) for index, request in enumerate(tally.requests))

    def _excused(self, tally: _Tally, index: int) -> bool:
        """Whether a member has joined. Joining concerns only requests in which all members take part."""
        return tally.ranks is self._ranks and index in self.joined

    def _decide(self, name: str, tally: _Tally) -> None:
        requests = tally.requests
        del self._pending[name]
        tally.requests = [None] * len(requests)
        tally.count = 0
        self._unsent.add(tally.identifier)
        if requests == tally.agreed and tally.ready is not None:  # lists compare elements by identity first
            tally.agreed = requests  # the objects that come the next time, too
            self.ready.append(tally.ready)
            return
        ready = self._decision(name, requests, tally)
        self.ready.append(ready)
        if tally.identifier < 0:
            del self._tallies[name]
            return
        self._burst = None
        if ready.decision.error or ready.decision.template is not None:
            tally.agreed = tally.ready = None
        else:
            tally.agreed, tally.ready = requests, ready._replace(fresh=False)

    def _decision(self, name: str, requests: list[Request | None], tally: _Tally) -> ReadyRequest:
        ranks = tally.ranks
        members = range(self._size) if ranks is self._ranks else map(self._ranks.index, ranks)
        ready = decide(name, requests, tally.identifier, ranks, members)
        if ready.key is None:
            return ready
        if len(self._keys) > _KEYS:
            self._keys.clear()
        return ready._replace(key=self._keys.setdefault(ready.key, ready.key))
