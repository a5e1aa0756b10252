"""Ranks on their way into ``init()``: who has come, who is missing, and who waits for whom in vain. Pure.

The rendezvous server keeps one :class:`RendezvousGroup` for each group of ranks that is about to meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from horovod.control.channel import Channel


@dataclass
class RendezvousGroup:
    """The ranks of one job, as far as they have come.

    Attributes:
        deadline, seconds: when the others must be there (``time.monotonic``), and how long that was from the first.
        members: by rank, its number in the launched job; empty where all that were launched take part.
        round: of an elastic job; 0 for other jobs.
        values, guests: what each rank brought, and its connection.
    """

    size: int
    deadline: float
    seconds: float
    members: list[int]
    round: int = 0
    values: dict[int, bytes] = field(default_factory=dict)
    guests: dict[int, Channel] = field(default_factory=dict)

    def launched(self, rank: int) -> int:
        """The number in the launched job of rank ``rank``."""
        return self.members[rank] if self.members else rank

    def present(self) -> list[int]:
        """Launched ranks that are here."""
        return sorted(map(self.launched, self.values))

    def missing(self) -> list[int]:
        """Launched ranks that are not."""
        return sorted(self.launched(rank) for rank in range(self.size) if rank not in self.values)

    def awaits(self, rank: int) -> bool:
        """Whether rank ``rank`` of the launched job is missing."""
        own = self.members.index(rank) if rank in self.members else -1 if self.members else rank
        return 0 <= own < self.size and own not in self.values

    def call(self) -> str:
        """What its ranks have called."""
        return f"hvd.init(comm={self.members})" if self.members else "hvd.init()"


def contradicting(groups: Mapping[str, RendezvousGroup], key: str) -> list[str]:
    """The gatherings that can never be complete because each waits for a guest of another, ``key`` among them.

    Whoever is here waits until all have come, so nobody can be expected who is already elsewhere in the circle.
    """
    here = {rank: name for name, group in groups.items() for rank in group.present()}
    awaited = {name: {here[rank] for rank in group.missing() if rank in here} for name, group in groups.items()}
    return [name for name in _reachable(awaited, key) if key in _reachable(awaited, name)]


def disagreement(groups: Sequence[RendezvousGroup]) -> str:
    """What is wrong with gatherings that wait for one another."""
    calls = "; ".join(f"{_ranks(group.present())} called {group.call()}" for group in groups)
    return f"the ranks do not agree on who takes part: {calls}. All ranks of one list must pass the same list in the same order"


def lateness(group: RendezvousGroup, others: Iterable[RendezvousGroup]) -> str:
    """Who did not come in time, and what they did instead where that is known."""
    missing = group.missing()
    text = (
        f"{_ranks(missing)} of {group.size} did not call {group.call()} within {group.seconds:.3g} seconds of the "
        "first rank. "
    )
    for other in others:
        elsewhere = sorted(set(missing) & set(other.present()))
        if elsewhere:
            text += f"Instead, {_ranks(elsewhere)} called {other.call()}. "
    return text + (
        "Look at the output of those ranks; if they only need more time to start, raise horovodrun --start-timeout "
        "(HOROVOD_START_TIMEOUT)"
    )


def abandonment(group: RendezvousGroup, departed: Mapping[int, str]) -> tuple[str, str]:
    """What is wrong with a gathering that waits for ranks whose processes have ended.

    Args:
        departed: how each of these ranks ended, by its number in the launched job; at least one, in the order of their ends.

    Returns:
        What the ranks that wait are told, and what can be said of the first that ended.
    """
    first, ranks, waiting, call = next(iter(departed)), sorted(departed), group.present(), group.call()
    codes = ", ".join(departed[rank].removeprefix("exit code ") for rank in ranks[:16])
    ended = f"has ended (exit code {codes})" if len(ranks) == 1 else f"have ended (exit codes {codes})"
    told = (
        f"{call} cannot complete: {_ranks(ranks)} of {group.size} {ended} instead of calling it. Look at the output of "
        f"{_ranks(ranks)}. All ranks must call it, as often as the others; those that are to take part can be listed: "
        f"hvd.init(comm={waiting if len(waiting) <= 16 else '[...]'})"
    )
    reason = f"it ended ({departed[first]}) instead of calling {call}, where {_ranks(waiting)} waited for it"
    return told, reason


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """What can be reached from ``start`` in one step or more."""
    found: set[str] = set()
    todo = [start]
    while todo:
        new = graph[todo.pop()] - found
        found |= new
        todo += new
    return found


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:16]))}" + (
        ", ..." if len(ranks) > 16 else ""
    )
