"""Changes of a job's hosts, as a rank receives them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from horovod.control.elastic_messages import HostUpdateResult

__all__ = ["Heard", "HostUpdateResult", "HostUpdates", "hear"]


class HostUpdates(Protocol):
    """Tells a rank that hosts were added or removed. The launcher implements it."""

    def poll(self) -> HostUpdateResult:
        """The changes since the last call, combined; ``no_update`` if there are none.

        The script's threads call it at each commit, so it must neither block nor communicate. A thread of the implementation
        may add updates meanwhile. Rank 0's answer counts for the job. Once :meth:`Rounds.next
        <horovod.elastic.rounds.Rounds.next>` has returned, updates that the new round takes into account are not reported
        again.
        """


class Heard(NamedTuple):
    """The updates of hosts that a rank has received up to a check. Rank 0's decide for all. Pure, as all that follows.

    Attributes:
        previous, latest: the time stamps of the latest update before the last check, and before this one.
        result: a :class:`HostUpdateResult`: how the hosts have changed between the two.
    """

    previous: float
    latest: float
    result: int

    @property
    def interrupts(self) -> bool:
        """Whether the ranks stop at this check."""
        return self.latest > self.previous

    @property
    def only_removed(self) -> bool:
        return self.result == HostUpdateResult.removed


def hear(previous: float, updates: Iterable[tuple[float, int]]) -> Heard:
    """Combines the updates that a rank has received since its last check, each with its time stamp."""
    latest, result = previous, int(HostUpdateResult.no_update)
    for timestamp, update in updates:
        latest, result = max(latest, timestamp), result | update
    return Heard(previous, latest, result)
