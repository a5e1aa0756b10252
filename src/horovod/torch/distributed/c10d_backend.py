"""The back end that PyTorch gets from 2.15 on: a Backend in Python, one of those that a ProcessGroup has for its devices.

Python code and C++ code call its operations by the same names. PyTorch uses only ``wait()`` and ``get_future()`` of the works
that it returns, and only the C++ part of a future. So if the group has several back ends, a work cannot tell the source of a
message, and collectives that a callback of a future calls cannot be named after that future. Both raise NotImplementedError.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace, WrapperDescriptorType
from typing import Any

import torch

from horovod.torch.distributed.base import NAME, BackendGroup
from horovod.torch.distributed.splitting import split
from horovod.torch.distributed.submission import Submitter
from horovod.torch.distributed.work import HorovodWork
from horovod.torch.uncompiled import uncompiled

_Base: Any = getattr(getattr(torch._C, "_distributed_c10d", None), "Backend", object)
AVAILABLE = not isinstance(_Base.__init__, WrapperDescriptorType)
"""Whether this PyTorch lets Python code derive from its Backend: before 2.15 that has no constructor of its own."""

_BackendBase: Any = _Base if AVAILABLE else object


@uncompiled
class HorovodBackend(BackendGroup, _BackendBase):  # type: ignore[misc]  # C++, without types
    """The operations of a group on Horovod's engines.

    Args:
        options: PyTorch's ``_DistributedBackendOptions``, or an object with its ``group_rank``, ``group_size``, ``store`` and
            ``timeout``.
        submitter: submits the calls of the group.
    """

    def __init__(self, options: Any, submitter: Submitter) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._join(options.store, submitter)

    supports_splitting = True

    def split(self, store: Any, ranks: Sequence[int], options: Any) -> HorovodBackend:
        """Make the back end of a group of some of the ranks. Every member of the new group must call it.

        If a group has several back ends, PyTorch splits each of them.

        Args:
            store: the store of the new group.
            ranks: the members: their ranks in this group, in their order in the new one.
            options: PyTorch's options of the back end, with the time limit.

        Raises:
            TimeoutError, RuntimeError: a member is missing, or could not take part; the message says which and why.
        """
        timeout = options._timeout
        index, submitter = split(self._submitter, store, ranks, timeout, names_callbacks=False)
        group = SimpleNamespace(group_rank=index, group_size=len(ranks), store=store, timeout=timeout)
        return HorovodBackend(group, submitter)

    def eager_connect_single_device(self, device: Any) -> None:
        """Does nothing: the ranks connect when the group is made."""

    def perform_nocolor_split(self, device: Any) -> None:
        """Does nothing: ranks outside a new group take no part in making it."""

    def recv_anysource(self, tensors: Any, tag: int = 0) -> HorovodWork:
        raise NotImplementedError(
            f'recv() from any source: in a group of several back ends PyTorch does not ask "{NAME}" which rank sent a message. '
            f'Name the source, or make a group with backend="{NAME}" alone.'
        )
