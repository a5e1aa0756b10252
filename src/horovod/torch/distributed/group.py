"""The group that PyTorch gets if this is its only back end: a ProcessGroup in Python, which replaces PyTorch's own.

PyTorch calls it from Python, and from C++ (DistributedDataParallel, functional collectives) for the operations that its
trampoline knows. Python code gets the works that the group has made, with all their methods, which those of a Backend lack in
Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from horovod.torch.distributed import backend
from horovod.torch.distributed.backend import HorovodBackend
from horovod.torch.distributed.base import BackendGroup
from horovod.torch.distributed.splitting import split
from horovod.torch.distributed.submission import Submitter

_ProcessGroup: Any = dist.ProcessGroup  # its stubs have overloads, and names that only the compiled class has

_DEVICES = ("cpu", "cuda")


class _WithoutBackend:
    """PyTorch's data in the back ends of a group. Before 2.15 a group in Python can have none."""

    _group_name = _group_description = ""

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

    def _get_backend(self, device: Any) -> Any:
        return self


_BASES: Any = (BackendGroup, _ProcessGroup) if backend.AVAILABLE else (BackendGroup, _WithoutBackend, _ProcessGroup)


class HorovodProcessGroup(*_BASES):  # type: ignore[misc]
    """A group of ranks whose operations run on Horovod's engines.

    Args:
        options: what PyTorch says of the group, its ``_DistributedBackendOptions``.
        submitter: of the group.
    """

    def __init__(self, options: Any, submitter: Submitter) -> None:
        super().__init__(options.group_rank, options.group_size)  # the constructor with a store makes no subclass
        self._join(options.store, submitter)
        if backend.AVAILABLE:
            self._backend = HorovodBackend(options, submitter)  # kept: PyTorch holds the half of it that is in C++
            kind = _ProcessGroup.BackendType.CUSTOM
            for device in _DEVICES:
                self._register_backend(torch.device(device), kind, self._backend)
            self._set_default_backend(kind)

    def get_group_store(self) -> Any:
        return self._store

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str = "",
        group_desc: str = "",
        device_types: Any = None,
    ) -> HorovodProcessGroup | None:
        """A group of some of its ranks: ``torch.distributed.split_group()`` calls it from PyTorch 2.15 on.

        Args:
            ranks: in this group, in their order in the new one. Each of them calls it.

        Returns:
            None on a rank that is not among them.
        """
        parent = self._submitter
        if parent.index not in ranks:
            return None
        store = dist.distributed_c10d.PrefixStore(f"{group_name}/", self._store)
        limit = timedelta(seconds=parent.seconds) if timeout is None else timeout
        index, submitter = split(parent, store, ranks, limit)
        group = SimpleNamespace(group_rank=index, group_size=len(ranks), store=store, timeout=limit)
        made = HorovodProcessGroup(group, submitter)
        made._set_group_name(group_name)
        made._set_group_desc(group_desc or "")
        return made
