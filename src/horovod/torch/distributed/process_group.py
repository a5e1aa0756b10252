"""The group that PyTorch gets if this is its only back end: a ProcessGroup in Python, which replaces PyTorch's own.

Python code of PyTorch calls it, and so does C++ code (DistributedDataParallel, functional collectives) for the operations that
the trampoline of the C++ class knows. Python code gets the works that the group has made, with all their methods. The works of
a Backend reach Python code without most of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from horovod.core.lifecycle import context
from horovod.core.lifecycle.generation import Generation
from horovod.torch.distributed import c10d_backend, calls_before_run
from horovod.torch.distributed.base import BackendGroup, Reconfiguration
from horovod.torch.distributed.c10d_backend import HorovodBackend
from horovod.torch.distributed.membership import GroupMembership
from horovod.torch.distributed.splitting import split
from horovod.torch.distributed.submission import Submitter
from horovod.torch.distributed.work import HorovodWork
from horovod.torch.uncompiled import uncompiled

_ProcessGroup: Any = dist.ProcessGroup  # its stubs have overloads, and names that only the compiled class has

_DEVICES = ("cpu", "cuda")


@uncompiled
class _WithoutBackend:
    """The names and devices that PyTorch keeps in the back ends of a group. Before 2.15 a group in Python can have no back end,
    so the group keeps them itself."""

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
        """The kinds of devices whose tensors the group accepts."""
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def _get_backend(self, device: Any) -> Any:
        return self


_BASES: Any = (
    (BackendGroup, _ProcessGroup) if c10d_backend.AVAILABLE else (BackendGroup, _WithoutBackend, _ProcessGroup)
)


@uncompiled
class HorovodProcessGroup(*_BASES):  # type: ignore[misc]
    """A group of ranks whose operations run on Horovod's engines.

    The default group of an elastic job has one membership after another (:meth:`follow`): its ranks, this process's number
    among them, the process set that carries its operations out, the count of its calls, and its store. The object stays the
    same.

    Args:
        options: PyTorch's ``_DistributedBackendOptions``, or an object with its ``group_rank``, ``group_size``, ``store`` and
            ``timeout``.
        submitter: submits the calls of the group.
    """

    def __init__(self, options: Any, submitter: Submitter) -> None:
        super().__init__(options.group_rank, options.group_size)  # the one with a store does not suit subclasses
        self._join(options.store, submitter)
        self._before_run = context.before_run()
        if c10d_backend.AVAILABLE:
            self._backend = HorovodBackend(options, submitter)  # kept alive here: PyTorch holds only the C++ object
            kind = _ProcessGroup.BackendType.CUSTOM
            for device in _DEVICES:
                self._register_backend(torch.device(device), kind, self._backend)
            self._set_default_backend(kind)

    @property
    def generation(self) -> Generation:
        """The runtime of the present membership."""
        generation: Generation = self._submitter.membership.generation
        return generation

    def follow(self, membership: GroupMembership) -> None:
        """Take the next membership. The process sets of earlier ones have ended."""
        submitter = Submitter(membership, self._submitter.seconds)
        self._join(membership.store, submitter)
        if c10d_backend.AVAILABLE:
            self._backend._join(membership.store, submitter)

    def change_members_by(self, reconfiguration: Reconfiguration) -> None:
        """Let the script change the members."""
        self._reconfiguration = reconfiguration
        if c10d_backend.AVAILABLE:
            self._backend._reconfiguration = reconfiguration

    def broadcast(self, tensors: Any = None, *arguments: Any, **options: Any) -> HorovodWork:
        operation: calls_before_run.Operation = super().broadcast
        if self._before_run is not None:
            return calls_before_run.broadcast(operation, tensors, *arguments, **options)
        return operation(tensors, *arguments, **options)

    def allgather(
        self, output_tensors: Any = None, input_tensors: Any = None, *arguments: Any, **options: Any
    ) -> HorovodWork:
        operation: calls_before_run.Operation = super().allgather
        if self._before_run is not None:
            return calls_before_run.allgather(operation, output_tensors, input_tensors, *arguments, **options)
        return operation(output_tensors, input_tensors, *arguments, **options)

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
        """Make a group of some of its ranks: ``torch.distributed.split_group()`` calls it from PyTorch 2.15 on.

        Every member of the new group must call it; other ranks may.

        Args:
            ranks: the members: their ranks in this group, in their order in the new one.
            timeout: the time limit of the new group; by default that of this one.
            group_name: also the prefix of the new group's keys in the store.
            opts, device_types: have no effect.

        Returns:
            The new group; None on a rank that is not a member.

        Raises:
            TimeoutError, RuntimeError: a member is missing, or could not take part; the message says which and why.
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
