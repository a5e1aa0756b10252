"""How ranks name one that is lost while they meet in ``init()``, where no liveness monitor runs yet.

A rank that loses another one says "lost rank N while ...", and passes this on to those that wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from horovod.control.processes import STOPPED, why_not_running


class LostRankError(Exception):
    """A base of errors that name a lost rank.

    Attributes:
        lost_rank: the rank, among all ranks of the job.
    """

    lost_rank: int


def text_of_loss(rank: int, doing: str, why: str) -> str:
    """What a rank says that has lost ``rank`` while it was ``doing`` something."""
    return f"lost rank {rank} while {doing}: {why}"


def stopped_rank(rank: int, processes: Sequence[tuple[str, int]], suspect: int) -> int:
    """A rank whose process is stopped, preferably ``suspect``; -1 if there is none on this host.

    Args:
        rank: this rank.
        processes: by rank, its process namespace and its process id.
    """
    own, _ = processes[rank]
    for other in range(-1, len(processes)):
        found = other if other >= 0 else suspect
        namespace, pid = processes[found]
        if own and namespace == own and why_not_running(pid) == STOPPED:
            return found
    return -1
