"""Makes a group from some ranks of another group. Only the members take part."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from horovod.torch.distributed.membership import of_some_ranks
from horovod.torch.distributed.submission import Submitter


def split(
    parent: Submitter, store: Any, ranks: Sequence[int], timeout: timedelta, names_callbacks: bool = True
) -> tuple[int, Submitter]:
    """Make a group from some ranks of ``parent``. Every member must call it, and no other rank.

    Args:
        parent: the submitter of the other group.
        store: a store that only the new group uses.
        ranks: the members: their ranks in the parent group, in their order in the new one. This rank is a member.
        timeout: the time limit of the new group.
        names_callbacks: see :class:`Submitter`.

    Returns:
        This rank's number in the new group, and the submitter of its calls.

    Raises:
        TimeoutError, RuntimeError: a member is missing, or could not take part; the message says which and why.
    """
    members = [parent.membership.ranks[rank] for rank in ranks]
    index = list(ranks).index(parent.index)
    found = of_some_ranks(store, index, len(ranks), members, timeout, f"ranks {members}")
    return index, Submitter(found, timeout.total_seconds(), names_callbacks)
