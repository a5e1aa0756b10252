"""A group of some ranks of another, which its members make without the others."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from horovod.torch.distributed.membership import of_some_ranks
from horovod.torch.distributed.submission import Submitter


def split(
    parent: Submitter, store: Any, ranks: Sequence[int], timeout: timedelta, names_callbacks: bool = True
) -> tuple[int, Submitter]:
    """This rank's number in the new group, and what submits its calls. Every member must call it.

    Args:
        store: of the new group alone.
        ranks: in the parent, in their order in the new group; this rank is among them.
        names_callbacks: see :class:`Submitter`.

    Raises:
        TimeoutError, RuntimeError: a member is missing, or could not take part; the message says which and why.
    """
    members = [parent.membership.ranks[rank] for rank in ranks]
    index = list(ranks).index(parent.index)
    found = of_some_ranks(store, index, len(ranks), members, timeout, f"ranks {members}")
    return index, Submitter(found, timeout.total_seconds(), names_callbacks)
