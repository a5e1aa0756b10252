"""The back end that PyTorch gets from 2.15 on: a Backend in Python, one of those that a ProcessGroup has for its devices.

All operations reach it from Python and from C++ alike, under the names by which Python calls them.
"""

from __future__ import annotations

from datetime import timedelta
from types import WrapperDescriptorType
from typing import Any

import torch

from horovod.torch.distributed.base import NAME, Group
from horovod.torch.distributed.membership import Membership

_Base: Any = getattr(getattr(torch._C, "_distributed_c10d", None), "Backend", object)
AVAILABLE = not isinstance(_Base.__init__, WrapperDescriptorType)
"""Whether this PyTorch lets Python code derive from its Backend: before 2.15 that has no constructor of its own."""

_BackendBase: Any = _Base if AVAILABLE else object


class HorovodBackend(Group, _BackendBase):  # type: ignore[misc]
    """The operations of a group on Horovod's engines.

    Args:
        options: what PyTorch says of the group.
        membership: its place in the runtime.
    """

    def __init__(self, options: Any, membership: Membership) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._join(options.store, membership, options.timeout)
        self._options = _options(options.timeout)

    @property
    def options(self) -> Any:
        return self._options


def _options(timeout: timedelta) -> Any:
    kind: Any = getattr(_BackendBase, "Options", None)
    return None if kind is None else kind(NAME, timeout)
