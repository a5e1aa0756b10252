"""The process group that PyTorch up to 2.14 gets: a ProcessGroup in Python, which takes the place of PyTorch's own.

PyTorch calls it from Python, and from C++ (DistributedDataParallel, functional collectives) for the operations that its
trampoline knows. What else C++ calls does not arrive here; :mod:`horovod.torch.distributed.functional` has the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from horovod.torch.distributed import membership as memberships
from horovod.torch.distributed.futures import threads
from horovod.torch.distributed.membership import Membership
from horovod.torch.distributed.operations import Operations
from horovod.torch.distributed.point_to_point.operations import PointToPoint
from horovod.torch.distributed.submission import Submitter

NAME = "horovod"

_ProcessGroup: Any = dist.ProcessGroup  # its stubs have overloads, and names that only the compiled class has


class HorovodProcessGroup(Operations, PointToPoint, _ProcessGroup):  # type: ignore[misc]
    """A group of ranks whose operations run on Horovod's engines.

    Args:
        store: of the group.
        rank, size: in the group.
        membership: its place in the runtime.
        timeout: of its calls.
    """

    def __init__(self, store: Any, rank: int, size: int, membership: Membership, timeout: timedelta) -> None:
        super().__init__(rank, size)  # the constructor with a store makes no subclass
        self._store = store
        self._submitter = Submitter(membership, timeout.total_seconds())
        self._membership = membership
        self._group_name = self._group_description = ""

    def getBackendName(self) -> str:
        return NAME

    def name(self) -> str:
        return NAME

    _get_backend_name = name

    def get_group_store(self) -> Any:
        return self._store

    # PyTorch keeps these in the back ends of a group; this one has none.

    def getGroupName(self) -> str:
        return self._group_name

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    _set_group_name = setGroupName

    def getGroupDesc(self) -> str:
        return self._group_description

    def setGroupDesc(self, description: str) -> None:
        self._group_description = description

    _set_group_desc = setGroupDesc

    @property
    def group_name(self) -> str:
        return self._group_name

    @property
    def group_desc(self) -> str:
        return self._group_description

    @property
    def _device_types(self) -> list[torch.device]:
        """The kinds of devices whose tensors it takes."""
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def _get_backend(self, device: Any) -> HorovodProcessGroup:
        return self

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def supports_tensor_alloc(self, device: Any) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        self._submitter.seconds = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """The runtime counts the calls of a group itself."""

    # The end

    def shutdown(self) -> None:
        """End the group: ``destroy_process_group()`` calls it."""
        memberships.leave(self._membership, "it called torch.distributed.destroy_process_group()")
        if self._membership.number == 0:
            threads.end()

    def abort(self) -> None:
        """Fail what the group has in flight, on all its ranks, and end it."""
        memberships.abort(self._membership, "its script aborted the process group")
        if self._membership.number == 0:
            threads.end()


def make(options: Any, _: Any = None) -> HorovodProcessGroup:
    """What PyTorch calls to make a group, with its ``_DistributedBackendOptions``.

    Raises:
        ValueError, TimeoutError, RuntimeError: the ranks do not find each other, or contradict each other.
    """
    store, rank, size = options.store, options.group_rank, options.group_size
    ranks: Sequence[int] = options.global_ranks_in_group
    if ranks:
        found = memberships.of_some_ranks(store, rank, size, ranks, options.timeout, f"ranks {list(ranks)}")
    else:
        found = memberships.of_all_ranks(store, rank, size, options.timeout)
    return HorovodProcessGroup(store, rank, size, found, options.timeout)
