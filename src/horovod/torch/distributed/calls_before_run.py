"""Calls of a group in front of ``hvd.elastic.run``, in an elastic job.

DistributedDataParallel's constructor compares the parameters of the ranks, and broadcasts those of rank 0. In a process that
joins a running job no other rank takes part in that, and ``hvd.elastic.run`` gives the process the parameters and buffers of
the others. So there the constructor gets the process's own values, as those of all ranks. Every other call raises an error
(:mod:`horovod.core.lifecycle.before_run`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from horovod.core.lifecycle import context
from horovod.core.requests.handle import Handle
from horovod.torch.distributed.arguments import nested
from horovod.torch.distributed.work import HorovodWork

Operation = Callable[..., HorovodWork]


def broadcast(operation: Operation, tensors: Sequence[torch.Tensor], *arguments: Any, **options: Any) -> HorovodWork:
    """``operation(tensors, ...)``, or nothing if no other rank takes part."""
    return _carry_out(operation, lambda: list(tensors), (tensors, *arguments), options)


def allgather(
    operation: Operation, outputs: Any, inputs: Sequence[torch.Tensor], *arguments: Any, **options: Any
) -> HorovodWork:
    """``operation(outputs, inputs, ...)``, or copies of the inputs if no other rank takes part."""

    def copied() -> list[torch.Tensor]:
        lists = nested(outputs)
        for parts, source in zip(lists, inputs, strict=True):
            for part in parts:
                part.copy_(source)
        return [part for parts in lists for part in parts]

    return _carry_out(operation, copied, (outputs, inputs, *arguments), options)


def _carry_out(
    operation: Operation, alone: Callable[[], list[torch.Tensor]], arguments: tuple[Any, ...], options: dict[str, Any]
) -> HorovodWork:
    guard = context.before_run()
    if guard is None or not _in_constructor():
        return operation(*arguments, **options)
    if not guard.alone:
        with guard.unwarned():
            return operation(*arguments, **options)
    handle = Handle()
    handle.complete()
    return HorovodWork(handle, None, alone(), operation.__name__)


def _in_constructor() -> bool:
    """Whether DistributedDataParallel's constructor is on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is DistributedDataParallel.__init__.__code__:
            return True
        frame = frame.f_back
    return False
