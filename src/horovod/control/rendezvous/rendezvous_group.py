"""The ranks that take part in one rendezvous: which have arrived, which are missing, and what their errors say. Pure.

The rendezvous server keeps one :class:`RendezvousGroup` for each exchange that is not complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from horovod._base.config import START_TIMEOUT
from horovod._base.running_time import running_time
from horovod.control.channel import Channel
from horovod.control.lost_rank import text_of_loss


@dataclass
class RendezvousGroup:
    """The ranks of one exchange.

    Attributes:
        size: how many ranks take part.
        deadline, seconds: when the last rank must have arrived (``time.monotonic``), and how long that is after the first.
        members: each rank's number in the launched job, by rank; empty where all launched ranks take part.
        round: the round of an elastic job; 0 for other jobs.
        values, clients: the value and the connection of each rank that has arrived.
    """

    size: int
    deadline: float
    seconds: float
    members: list[int]
    round: int = 0
    values: dict[int, bytes] = field(default_factory=dict)
    clients: dict[int, Channel] = field(default_factory=dict)

    def left(self, now: float) -> float:
        """The seconds that are left for the missing ranks. Time in which this process was stopped does not count."""
        return self.seconds - running_time.age(self.deadline - self.seconds, now)

    def launched(self, rank: int) -> int:
        """The number of rank ``rank`` in the launched job."""
        return self.members[rank] if self.members else rank

    def present(self) -> list[int]:
        """The ranks that have arrived, by their numbers in the launched job."""
        return sorted(map(self.launched, self.values))

    def missing(self) -> list[int]:
        """The ranks that have not arrived, by their numbers in the launched job."""
        return sorted(self.launched(rank) for rank in range(self.size) if rank not in self.values)

    def awaits(self, rank: int) -> bool:
        """Whether rank ``rank`` of the launched job is missing."""
        own = self.members.index(rank) if rank in self.members else -1 if self.members else rank
        return 0 <= own < self.size and own not in self.values

    def call(self) -> str:
        """The call that its ranks have made."""
        return f"hvd.init(comm={self.members})" if self.members else "hvd.init()"


@dataclass
class FailedExchange:
    """An exchange that has failed, and was not repeated with success.

    Attributes:
        lost: the rank of the launched job for which others waited until they failed; -1 if there is none.
        error, why: the error of the others, and why that rank is to blame.
        heard: the ranks of the launched job that got this error.
    """

    lost: int
    error: str
    why: str
    heard: set[int]


def timeout_error(group: RendezvousGroup, others: Iterable[RendezvousGroup]) -> str:
    """The error of a group that has timed out: which ranks are missing, and which other calls those have made, if any.

    Args:
        group: the group that has timed out.
        others: the groups that are still waiting. Ranks that pass contradicting lists wait in different groups.
    """
    missing = group.missing()
    text = (
        f"{_ranks(missing)} of {group.size} did not call {group.call()} within {group.seconds:.3g} seconds of the "
        "first rank. "
    )
    for other in others:
        elsewhere = sorted(set(missing) & set(other.present()))
        if elsewhere:
            text += (
                f"Instead, {_ranks(elsewhere)} called {other.call()}. All ranks of one list must pass the same list in the "
                "same order. "
            )
    return text + (
        "Look at the output of those ranks; if they only need more time to start, raise horovodrun --start-timeout "
        f"({START_TIMEOUT})"
    )


def ended_processes_error(
    group: RendezvousGroup, departed: Mapping[int, str], in_the_middle: bool = False
) -> tuple[str, str]:
    """The error of a group that waits for ranks whose processes have ended.

    Args:
        group: the group that waits.
        departed: how each of these ranks ended, by its number in the launched job, in the order in which they ended; at least
            one.
        in_the_middle: these ranks have made the call, and ended before it was complete.

    Returns:
        The error for the ranks that wait, and the reason why the first rank that ended is to blame.
    """
    first, ranks, waiting, call = next(iter(departed)), sorted(departed), group.present(), group.call()
    codes = ", ".join(departed[rank].removeprefix("exit code ") for rank in ranks[:16])
    ended = f"has ended (exit code {codes})" if len(ranks) == 1 else f"have ended (exit codes {codes})"
    if in_the_middle:
        why = text_of_loss(first, "the ranks met in init()", f"its process ended ({departed[first]})")
        return f"{call} cannot complete: {why}. Look at the output of {_ranks(ranks)}", why
    error = (
        f"{call} cannot complete: {_ranks(ranks)} of {group.size} {ended} instead of calling it. Look at the output of "
        f"{_ranks(ranks)}. All ranks must call it, and equally often; to run with only some ranks, list these: "
        f"hvd.init(comm={waiting if len(waiting) <= 16 else '[...]'})"
    )
    reason = f"it ended ({departed[first]}) instead of calling {call}, where {_ranks(waiting)} waited for it"
    return error, reason


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:16]))}" + (
        ", ..." if len(ranks) > 16 else ""
    )
