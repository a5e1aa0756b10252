"""The back end that PyTorch gets from 2.15 on: a Backend in Python, one of those that a ProcessGroup has for its devices.

All operations reach it from Python and from C++ alike, under the names by which Python calls them. PyTorch takes ``wait()`` and
``get_future()`` alone from the works that it returns, and of a future what C++ knows of it. So where it is one of several of
its group, a work cannot tell the source of a message, and the calls that a callback of a future makes cannot be named after
that future; both are errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace, WrapperDescriptorType
from typing import Any

import torch

from horovod.torch.distributed.base import NAME, BackendGroup
from horovod.torch.distributed.splitting import split
from horovod.torch.distributed.submission import Submitter
from horovod.torch.distributed.work import HorovodWork

_Base: Any = getattr(getattr(torch._C, "_distributed_c10d", None), "Backend", object)
AVAILABLE = not isinstance(_Base.__init__, WrapperDescriptorType)
"""Whether this PyTorch lets Python code derive from its Backend: before 2.15 that has no constructor of its own."""

_BackendBase: Any = _Base if AVAILABLE else object


class HorovodBackend(BackendGroup, _BackendBase):  # type: ignore[misc]  # C++, without types
    """The operations of a group on Horovod's engines.

    Args:
        options: what PyTorch says of the group.
        submitter: of the group.
    """

    def __init__(self, options: Any, submitter: Submitter) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._join(options.store, submitter)
        self._options = _options(options.timeout)

    supports_splitting = True

    def split(self, store: Any, ranks: Sequence[int], options: Any) -> HorovodBackend:
        """The back end of a group of some of the ranks, which call it. PyTorch splits each back end of a group with several."""
        timeout = options._timeout
        index, submitter = split(self._submitter, store, ranks, timeout, names_callbacks=False)
        group = SimpleNamespace(group_rank=index, group_size=len(ranks), store=store, timeout=timeout)
        return HorovodBackend(group, submitter)

    def eager_connect_single_device(self, device: Any) -> None:
        """Connections are made when the group is."""

    def perform_nocolor_split(self, device: Any) -> None:
        """A rank that is not in a new group has no part in it."""

    @property
    def options(self) -> Any:
        return self._options

    def recv_anysource(self, tensors: Any, tag: int = 0) -> HorovodWork:
        raise NotImplementedError(
            f'recv() from any source: in a group of several back ends PyTorch does not ask "{NAME}" where a message came from. '
            f'Name the source, or make a group with backend="{NAME}" alone.'
        )


def _options(timeout: timedelta) -> Any:
    kind: Any = getattr(_BackendBase, "Options", None)
    return None if kind is None else kind(NAME, timeout)
