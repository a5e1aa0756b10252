"""Makes a group when PyTorch asks for one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod.torch.distributed import backend, membership
from horovod.torch.distributed.backend import HorovodBackend
from horovod.torch.distributed.group import HorovodProcessGroup


def make(options: Any) -> HorovodProcessGroup | HorovodBackend:
    """A group of all ranks, or of those that the options list. Every member must call it.

    Args:
        options: PyTorch's ``_DistributedBackendOptions``.

    Raises:
        ValueError, TimeoutError, RuntimeError: the ranks do not find each other, or contradict each other.
    """
    store, rank, size = options.store, options.group_rank, options.group_size
    ranks: Sequence[int] = options.global_ranks_in_group
    if ranks:
        found = membership.of_some_ranks(store, rank, size, ranks, options.timeout, f"ranks {list(ranks)}")
    else:
        found = membership.of_all_ranks(store, rank, size, options.timeout)
    kind = HorovodBackend if backend.AVAILABLE else HorovodProcessGroup
    return kind(options, found)
