"""allreduce of dense tensors: in place or not, asynchronous or not, one tensor or a group.

The public functions repeat one list of arguments. Inside, the arguments are a list of tensors, a name and a ``Reducing``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from horovod.comm.spans import Spans, Vectors
from horovod.core.process_set import ProcessSet, global_process_set
from horovod.core.submission import collectives
from horovod.core.submission.arguments import full_name, set_id
from horovod.core.submission.devices import Reduction
from horovod.core.submission.prepared import Prepared, recall, remember
from horovod.observe.call_site import caller
from horovod.torch.compression import Compression, Compressor
from horovod.torch.device.memory import host_memory, memory_of
from horovod.torch.ops.arguments import Reducing, compressed, tracked
from horovod.torch.ops.handles import register, synchronize
from horovod.torch.ops.tensors import check, check_sign, empty_like, flat_array, is_plain, layout_of, plain

_SINGLE, _GROUP = "allreduce", "grouped_allreduce"


def _start(
    prefix: str,
    tensors: Sequence[torch.Tensor],
    name: str | None,
    how: Reducing,
    in_place: bool,
    awaited: bool = False,
) -> int:
    """Start to reduce; a group's result is a tuple. ``awaited``: what follows is to wait for it."""
    if prefix == _SINGLE and type(name) is str and name:
        tensor = tensors[0]
        if isinstance(tensor, torch.Tensor) and tensor.is_cpu and not tensor.dtype.is_complex:
            return _start_named(tensor, name, how, in_place, awaited)
    if not in_place:
        for tensor in tensors:
            check(tensor)
    outputs = tensors if in_place else [empty_like(tensor) for tensor in tensors]
    memory = memory_of(tensors, Reduction(how.op, how.prescale, how.postscale))
    sources, targets = memory.reduce(tensors, outputs)
    handle = collectives.allreduce(
        prefix, name, sources, targets, how.op, how.prescale, how.postscale, set_id(how.process_set), awaited
    )
    result = outputs[0] if prefix == _SINGLE else tuple(outputs)
    return register(handle, memory, result)


def _start_named(tensor: torch.Tensor, name: str, how: Reducing, in_place: bool, awaited: bool) -> int:
    """Start to reduce one tensor in host memory, which probably travels under this name time and again.

    The same as above in fewer steps: what is small consists of little else.
    """
    line = caller(above=3)  # this function, _start() and who calls that are none of the user's
    key = (tensor.__class__, tensor.dtype, tensor.shape, how.op, how.prescale, how.postscale, line)
    prepared = recall(name, key)
    if prepared is None or not is_plain(tensor):
        prepared = _prepare(tensor, name, key, how, line)
    sources = prepared.at((tensor.data_ptr(),))
    if sources.layout.sizes[0] == 1:
        check_sign(tensor)
    targets: Vectors = sources
    owner: object = tensor
    result = tensor
    if not in_place:
        result = empty_like(tensor)
        # What is waited for probably travels alone, and then an array is needed.
        targets = (flat_array(result),) if awaited else Spans(sources.layout, (result.data_ptr(),))
        owner = tensor, result
    handle = prepared.submit(how.process_set.process_set_id, sources, targets, awaited, owner)
    return register(handle, host_memory, result)


def _prepare(tensor: torch.Tensor, name: str, key: tuple[object, ...], how: Reducing, line: str) -> Prepared:
    """Check a tensor, and prepare its allreduce. Raises as :func:`check`."""
    called = full_name(_SINGLE, name)
    specs = [(called, check(tensor), tuple(tensor.shape))]
    request = collectives.allreduce_request(called, specs, how.op, how.prescale, how.postscale, line)
    return remember(name, Prepared(key, request, layout_of([tensor])))


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start reducing ``tensor`` over the ranks of ``process_set``; a handle for :func:`synchronize` and :func:`poll`.

    Every member calls it with the same name, shape, dtype, op and factors. The tensor must not be changed until the handle
    is synchronised, which returns a new tensor of its shape.

    Raises:
        ValueError: sparse, not contiguous, an unsupported dtype or device, a name in flight, not a member.
        HorovodInternalError: not initialised, or the job has failed.
    """
    how = Reducing.of(op, average, prescale_factor, postscale_factor, process_set)
    return _start(_SINGLE, [tensor], name, how, in_place=False)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Like :func:`allreduce_async`, in place: the result is written into ``tensor``."""
    how = Reducing.of(op, average, prescale_factor, postscale_factor, process_set)
    return _start(_SINGLE, [tensor], name, how, in_place=True)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce ``tensor`` in place and return it. No gradient flows through it."""
    how = Reducing.of(op, average, prescale_factor, postscale_factor, process_set)
    result: torch.Tensor = synchronize(_start(_SINGLE, [tensor], name, how, in_place=True, awaited=True))
    return result


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Like :func:`allreduce_async` for several tensors that become ready together; its result is a tuple of new tensors.

    They may differ in shape and dtype, and must be on one device.
    """
    how = Reducing.of(op, average, prescale_factor, postscale_factor, process_set)
    return _start(_GROUP, list(tensors), name, how, in_place=False)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Like :func:`grouped_allreduce_async`, in place: its result is a tuple of the tensors themselves."""
    how = Reducing.of(op, average, prescale_factor, postscale_factor, process_set)
    return _start(_GROUP, list(tensors), name, how, in_place=True)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Reduce several tensors in place, as one group, and return them."""
    how = Reducing.of(op, average, prescale_factor, postscale_factor, process_set)
    result: tuple[torch.Tensor, ...] = synchronize(
        _start(_GROUP, list(tensors), name, how, in_place=True, awaited=True)
    )
    return result


class HorovodAllreduce(torch.autograd.Function):
    """The gradients of an allreduce are the allreduce of the gradients, in the same way; alone or as a group."""

    @staticmethod
    def forward(ctx: Any, prefix: str, name: str | None, how: Reducing, *tensors: torch.Tensor) -> Any:
        ctx.prefix, ctx.how = prefix, how
        return synchronize(_start(prefix, tensors, name, how, in_place=False, awaited=True))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, None, *_reduced(ctx.prefix, [plain(grad) for grad in grads], None, ctx.how)


HorovodGroupedAllreduce = HorovodAllreduce


def _reduced(prefix: str, tensors: Sequence[torch.Tensor], name: str | None, how: Reducing) -> Sequence[torch.Tensor]:
    """New tensors, which know where they come from if autograd is interested."""
    if tracked(*tensors):
        result = HorovodAllreduce.apply(prefix, name, how, *tensors)  # type: ignore[no-untyped-call]  # torch's
    else:
        result = synchronize(_start(prefix, tensors, name, how, in_place=False, awaited=True))
    return [result] if prefix == _SINGLE else result


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """``postscale_factor * reduce(op, prescale_factor * tensor)`` over the ranks of ``process_set``, as a new tensor.

    Differentiable. The default op is ``hvd.Average``. Arguments and errors as :func:`allreduce_async`.
    """
    how = Reducing.of(op, average, prescale_factor, postscale_factor, process_set)
    return compressed(compression, [tensor], lambda travelling: _reduced(_SINGLE, travelling, name, how))[0]


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors as one group, into new tensors. Differentiable."""
    how = Reducing.of(op, average, prescale_factor, postscale_factor, process_set)
    return compressed(compression, tensors, lambda travelling: _reduced(_GROUP, travelling, name, how))
