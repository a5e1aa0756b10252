"""The process group that PyTorch up to 2.14 gets: a ProcessGroup in Python, which takes the place of PyTorch's own.

PyTorch calls it from Python, and from C++ (DistributedDataParallel, functional collectives) for the operations that its
trampoline knows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from horovod.torch.distributed.base import Group
from horovod.torch.distributed.membership import Membership

_ProcessGroup: Any = dist.ProcessGroup  # its stubs have overloads, and names that only the compiled class has


class HorovodProcessGroup(Group, _ProcessGroup):  # type: ignore[misc]
    """A group of ranks whose operations run on Horovod's engines.

    Args:
        options: what PyTorch says of the group, its ``_DistributedBackendOptions``.
        membership: its place in the runtime.
    """

    def __init__(self, options: Any, membership: Membership) -> None:
        super().__init__(options.group_rank, options.group_size)  # the constructor with a store makes no subclass
        self._join(options.store, membership, options.timeout)
        self._group_name = self._group_description = ""

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
