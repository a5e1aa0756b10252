"""Counts what the members of one host have announced, and passes a name on once for all of them. Pure: no I/O, no clock.

A relay keeps one (:mod:`horovod.core.worker.relay`). A name goes up

1. once for the whole host, when all members of the host that take part and have not joined have announced the same;
2. once for each member, when all have announced it and their requests differ;
3. once for each member, as they announce it, after a member that has announced it has joined, and when :data:`HELD_SECONDS`
   have passed since the first announcement. So the coordinator knows which members a name waits for.

Some members alone take part in a request on device memory of another process set (:attr:`Request.members`). Joining does not
concern such a request.

The announcements of one member may overtake each other, but not its joining, which comes behind everything that the member has
announced before. Its leaving ends the process set, so it waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from horovod.core.negotiation.messages import Operation, Request
from horovod.core.negotiation.ready_request import NegotiationError

ALL_MEMBERS = -1
"""Instead of a member's rank: all members of the host that take part in a request and have not joined."""

HELD_SECONDS = 1.0
"""Time after which an incomplete name is passed on for each member separately."""

_JOIN = Operation.JOIN


class HostShare(NamedTuple):
    """Requests that go to the coordinator together.

    Attributes:
        member: the member that announced them, or :data:`ALL_MEMBERS`.
        since: when each was submitted; empty unless :attr:`HostTally.gathers` is set.
    """

    member: int
    requests: list[Request]
    since: list[float]


class _Name:
    """A name that some members of the host have announced and others have not.

    Attributes:
        ranks: as :attr:`Request.members`.
        members: the members of the host that take part.
    """

    __slots__ = ("members", "passed_on", "ranks", "requests", "since")

    def __init__(self, ranks: tuple[int, ...], members: Sequence[int], since: float, passed_on: bool) -> None:
        self.ranks = ranks
        self.members = members
        self.since = since
        self.passed_on = passed_on
        self.requests: dict[int, Request] = {}


class HostTally:
    """The announcements of the members of one host.

    Args:
        members: their indices in the process set.
        ranks: their global ranks.
    """

    def __init__(self, members: Sequence[int], ranks: Sequence[int]) -> None:
        self._members = members
        self._ranks = ranks
        self._gathers = True
        self._names: dict[str, _Name] = {}
        self._joined: set[int] = set()
        self._shares: list[HostShare] = []
        self._open: dict[int, HostShare] = {}

    @property
    def gathers(self) -> bool:
        """Whether names wait for all members of the host. Otherwise each announcement goes up at once, with its time."""
        return self._gathers

    @gathers.setter
    def gathers(self, gathers: bool) -> None:
        self._gathers = gathers
        if not gathers:
            for name in self._names.values():
                self._pass_on(name)

    def announce(self, member: int, requests: Sequence[Request], now: float, since: Sequence[float] = ()) -> None:
        """Take one member's requests.

        Args:
            since: when each was submitted; empty: now.

        Raises:
            NegotiationError: the member has announced one of the names before.
        """
        names = self._names
        for index, request in enumerate(requests):
            if request.operation is _JOIN:
                self._join(member, request, now)
                continue
            at = since[index] if index < len(since) else now
            if member in self._joined:
                self._put(member, request, at)
                continue
            name = names.get(request.name)
            if name is None:
                members = self._taking_part(request)
                name = names[request.name] = _Name(request.members, members, now, not self._gathers)
            if request.members != name.ranks or member not in name.members:  # the coordinator finds out what is wrong
                self._pass_on(name)
                self._put(member, request, at)
                continue
            if member in name.requests:
                raise NegotiationError(f"it announced {request.name!r} twice")
            name.requests[member] = request
            if name.passed_on:
                self._put(member, request, at)
            if len(name.requests) == len(name.members) or (self._joined and self._complete(name)):
                self._finish(request.name, name)

    def all_joined(self) -> None:
        """Note that all members of the process set have joined, and announce again from now on."""
        self._joined.clear()

    def pass_on_overdue(self, now: float) -> None:
        """Pass on what has been held for :data:`HELD_SECONDS`."""
        for name in self._names.values():  # the oldest first
            if now < name.since + HELD_SECONDS:
                break
            self._pass_on(name)

    def due(self) -> float | None:
        """When :meth:`pass_on_overdue` will have something to pass on; None if nothing is held."""
        return next((each.since + HELD_SECONDS for each in self._names.values() if not each.passed_on), None)

    def take(self) -> list[HostShare]:
        """The requests to send to the coordinator now, in this order."""
        self._close()
        shares, self._shares = self._shares, []
        return shares

    def _join(self, member: int, request: Request, now: float) -> None:
        if member in self._joined:
            raise NegotiationError("it joined twice")
        for name in self._names.values():
            if member in name.requests:
                self._pass_on(name)
        self._joined.add(member)
        self._close()  # the set of all members changes here
        self._put(member, request, now)
        self._close()
        for text, name in list(self._names.items()):
            if self._complete(name):
                self._finish(text, name)

    def _taking_part(self, request: Request) -> Sequence[int]:
        if not request.members:
            return self._members
        ranks = zip(self._members, self._ranks, strict=True)
        return [member for member, rank in ranks if rank in request.members]

    def _complete(self, name: _Name) -> bool:
        excused = () if name.ranks else self._joined
        return all(member in name.requests or member in excused for member in name.members)

    def _finish(self, text: str, name: _Name) -> None:
        del self._names[text]
        if name.passed_on:
            return
        requests = list(name.requests.values())
        if requests.count(requests[0]) == len(requests):  # equal objects are compared by identity first
            self._put(ALL_MEMBERS, requests[0], name.since)
        else:
            self._pass_on(name)

    def _pass_on(self, name: _Name) -> None:
        """Pass on each member's announcement of the name separately from now on."""
        if not name.passed_on:
            name.passed_on = True
            for member, request in name.requests.items():
                self._put(member, request, name.since)

    def _put(self, member: int, request: Request, at: float) -> None:
        share = self._open.get(member)
        if share is None:
            share = self._open[member] = HostShare(member, [], [])
        share.requests.append(request)
        if not self._gathers:
            share.since.append(at)

    def _close(self) -> None:
        """Close the present share, so that later requests follow everything before them."""
        self._shares += self._open.values()
        self._open = {}
