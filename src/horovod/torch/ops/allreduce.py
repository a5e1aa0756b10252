"""allreduce of dense tensors: in place or into new ones, asynchronous or blocking, one tensor or a group.

The public functions repeat one list of arguments, because scripts pass them by position. Inside, the arguments are a list of
tensors, a name and a :class:`~horovod._bindings.reductions.ReductionArguments`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from horovod._bindings.reductions import ReductionArguments, checked_reduction
from horovod.comm.compression.block_reduction import Errors
from horovod.comm.spans import Spans, Vectors
from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.core.negotiation.messages import Operation, TensorSpec
from horovod.core.submission import collectives
from horovod.core.submission.prepared import Prepared, device_of, recall, remember
from horovod.core.submission.requests import make_request
from horovod.observe.call_site import caller
from horovod.torch.compression import Compression, Compressor, NoneCompressor
from horovod.torch.device.memory import memory_of
from horovod.torch.ops.arguments import compressed
from horovod.torch.ops.handles import Started, register
from horovod.torch.tensors import check, check_sign, empty_like, flat_array, is_plain, layout_of, plain, tracked
from horovod.torch.uncompiled import uncompiled

_SINGLE, _GROUP = "allreduce", "grouped_allreduce"


def _start(
    tensor: torch.Tensor, name: str | None, reduction: ReductionArguments, in_place: bool, awaited: bool = False
) -> Started:
    """Start the reduction of one tensor. It is mostly reduced again by its name or in its line: then it has been checked and
    described before, if it lies in host memory.

    Args:
        awaited: the caller waits for the result next.
    """
    if not isinstance(tensor, torch.Tensor) or not tensor.is_cpu or not (name is None or type(name) is str):
        return _start_several(_SINGLE, [tensor], name, reduction, in_place, awaited)
    line = caller(2)  # without this frame and that of the public function
    op, form = reduction.op, reduction.form
    key = (tensor.__class__, tensor.dtype, tensor.shape, op, reduction.prescale, reduction.postscale, form, line)
    call = recall(name or key, key)
    if call is None or not is_plain(tensor):
        call = remember(name or key, _prepared(tensor, name, key, reduction, line))
    if call.layout is None:
        return _start_several(_SINGLE, [tensor], name, reduction, in_place, awaited)
    result = tensor if in_place else empty_like(tensor)
    if call.layout.sizes[0] == 1:
        check_sign(tensor)
    at = (tensor.data_ptr(),)
    # An awaited call is probably not batched with others, and then the engine needs arrays.
    sources: Vectors = call.arrays_at(at) if awaited else call.at(at)
    targets = sources
    owner: object = tensor
    if not in_place:
        targets = (flat_array(result),) if awaited else Spans(call.layout, (result.data_ptr(),))
        owner = tensor, result
    return Started(call.submit(reduction.process_set.process_set_id, sources, targets, awaited, owner), None, result)


def _prepared(
    tensor: torch.Tensor, name: str | None, key: tuple[object, ...], reduction: ReductionArguments, line: str
) -> Prepared:
    """Check a tensor in host memory, and prepare its allreduce. Raises as :func:`check`."""
    spec = TensorSpec("", check(tensor), tuple(tensor.shape))
    request = make_request(
        Operation.ALLREDUCE,
        _SINGLE,
        name,
        [spec],
        reduction.op,
        reduction.prescale,
        reduction.postscale,
        line=line,
        compression=reduction.form,
    )
    return Prepared(key, request, layout_of([tensor]))


def _start_several(
    prefix: str,
    tensors: Sequence[torch.Tensor],
    name: str | None,
    reduction: ReductionArguments,
    in_place: bool,
    awaited: bool = False,
) -> Started:
    """Start the reduction of a group, whose result is a tuple, or of one tensor of any kind."""
    if not in_place:
        for tensor in tensors:
            check(tensor)
    outputs = tensors if in_place else [empty_like(tensor) for tensor in tensors]
    memory = memory_of(tensors, reduction)
    sources, targets = memory.reduce(tensors, outputs)
    form = reduction.form
    handle = collectives.allreduce(prefix, name, sources, targets, *reduction.positional, awaited, form)
    return Started(handle, memory, outputs[0] if prefix == _SINGLE else tuple(outputs))


@uncompiled
def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to reduce ``tensor`` over the ranks of ``process_set``. Returns a handle for :func:`synchronize` and :func:`poll`.

    Every member must call it with the same name, shape, dtype, op and factors. The script must not change the tensor until
    :func:`synchronize` has returned. Not differentiable.

    Args:
        tensor: a dense, contiguous tensor of any shape, in host memory or on a CUDA or ROCm device. Its dtype is bool, any
            integer type, float16, bfloat16, float32, float64, complex64 or complex128.
        average: deprecated; use ``op``. True means ``hvd.Average``, False ``hvd.Sum``.
        name: identifies the call. Calls without a name are matched by their order, so all members must make them in the same
            order.
        op: ``hvd.Average`` (the default), ``Sum``, ``Adasum``, ``Min``, ``Max`` or ``Product``. Adasum takes floating-point
            numbers only, complex numbers allow Average and Sum only, and bools cannot be averaged.
        prescale_factor, postscale_factor: each element is multiplied by the first before the reduction, and by the second
            afterwards. Bools cannot be scaled.
        process_set: the ranks that reduce. This rank must be a member.

    Returns:
        A handle. :func:`synchronize` returns a new tensor of the same shape, dtype and device for it.

    Raises:
        TypeError, ValueError: an argument is wrong. The tensor is sparse, not contiguous, or of an unsupported dtype or device;
            the name is in use; this rank is not a member.
        HorovodInternalError: not initialised, or the job has failed. :func:`synchronize` raises it if the ranks disagree.
    """
    reduction = checked_reduction(op, average, prescale_factor, postscale_factor, process_set)
    return register(_start(tensor, name, reduction, in_place=False))


@uncompiled
def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """:func:`allreduce_async` in place, with the same arguments and errors.

    Until :func:`synchronize` has returned, the script must neither read nor change ``tensor``.

    Returns:
        A handle, for which :func:`synchronize` returns ``tensor`` itself.
    """
    reduction = checked_reduction(op, average, prescale_factor, postscale_factor, process_set)
    return register(_start(tensor, name, reduction, in_place=True))


@uncompiled
def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce ``tensor`` in place, and return it. Waits for the result. Not differentiable.

    Every member of ``process_set`` must call it. The arguments and errors are those of :func:`allreduce_async`. It also raises
    HorovodInternalError if the ranks disagree.
    """
    reduction = checked_reduction(op, average, prescale_factor, postscale_factor, process_set)
    result: torch.Tensor = _start(tensor, name, reduction, in_place=True, awaited=True).result()
    return result


@uncompiled
def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """:func:`allreduce_async` of several tensors in one request: none is reduced before all ranks have submitted all of them.

    Every member must call it with the same number of tensors in the same order. The other arguments and the errors are those
    of :func:`allreduce_async`.

    Args:
        tensors: the tensors may differ in shape and dtype, and must be on one device.

    Returns:
        A handle, for which :func:`synchronize` returns a tuple of new tensors in the order of ``tensors``.
    """
    reduction = checked_reduction(op, average, prescale_factor, postscale_factor, process_set)
    return register(_start_several(_GROUP, list(tensors), name, reduction, in_place=False))


@uncompiled
def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """:func:`grouped_allreduce_async` in place, with the same arguments and errors.

    Raises ValueError if two of the tensors share memory.

    Returns:
        A handle, for which :func:`synchronize` returns a tuple of the tensors themselves.
    """
    reduction = checked_reduction(op, average, prescale_factor, postscale_factor, process_set)
    return register(_start_several(_GROUP, list(tensors), name, reduction, in_place=True))


@uncompiled
def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Reduce several tensors in place in one request, and return them as a tuple. Waits for the result. Not differentiable.

    The arguments and errors are those of :func:`grouped_allreduce_async_`. It also raises HorovodInternalError if the ranks
    disagree.
    """
    reduction = checked_reduction(op, average, prescale_factor, postscale_factor, process_set)
    started = _start_several(_GROUP, list(tensors), name, reduction, in_place=True, awaited=True)
    result: tuple[torch.Tensor, ...] = started.result()
    return result


@uncompiled
def grouped_allreduce_alike(
    tensors: Sequence[torch.Tensor],
    labels: Sequence[str],
    name: str,
    reduction: ReductionArguments,
    alike: str = "",
    errors: Callable[[], Errors] | None = None,
) -> int:
    """:func:`grouped_allreduce_async_` for an optimizer.

    Args:
        labels: the names of the tensors in errors; empty for names made from that of the call.
        alike: what else must agree on all ranks, as in :class:`horovod.core.negotiation.messages.Request`.
        errors: returns the memory for error feedback, by tensor; None for memory that belongs to the call. Called only if these
            ranks compress.
    """
    memory = memory_of(tensors, reduction)
    sources, targets = memory.reduce(tensors, tensors)
    call = collectives.prepared_call(
        Operation.ALLREDUCE,
        _GROUP,
        name,
        sources,
        reduction.op,
        reduction.prescale,
        reduction.postscale,
        device=device_of(sources),
        labels=labels,
        alike=alike,
        compression=reduction.form,
    )
    members = reduction.process_set.process_set_id
    kept = errors() if errors is not None and call.compresses(members) else call.errors(members)
    handle = collectives.submit(members, call.request, sources, targets, errors=kept)
    return register(Started(handle, memory, tuple(tensors)))


@uncompiled
class HorovodAllreduce(torch.autograd.Function):
    """The gradients of an allreduce, or of a group: the gradients are reduced in the same way."""

    @staticmethod
    def forward(ctx: Any, prefix: str, name: str | None, reduction: ReductionArguments, *tensors: torch.Tensor) -> Any:
        ctx.prefix, ctx.reduction = prefix, reduction
        return _blocking(prefix, name, reduction, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, None, *_reduced(ctx.prefix, [plain(grad) for grad in grads], None, ctx.reduction)


HorovodGroupedAllreduce = HorovodAllreduce


def _blocking(prefix: str, name: str | None, reduction: ReductionArguments, *tensors: torch.Tensor) -> Any:
    """Reduce into new tensors, and wait for them. The result of a group is a tuple."""
    if prefix == _SINGLE:
        return _start(tensors[0], name, reduction, in_place=False, awaited=True).result()
    return _start_several(prefix, tensors, name, reduction, in_place=False, awaited=True).result()


def _reduced(
    prefix: str, tensors: Sequence[torch.Tensor], name: str | None, reduction: ReductionArguments
) -> Sequence[torch.Tensor]:
    """Reduce into new tensors, and let autograd record it if a tensor requires a gradient."""
    run: Any = HorovodAllreduce.apply if tracked(*tensors) else _blocking
    result = run(prefix, name, reduction, *tensors)
    return [result] if prefix == _SINGLE else result


@uncompiled
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

    Waits for the result. Every member must call it with the same name, shape, dtype, op and factors. Differentiable: the
    gradient is reduced in the same way, so every member must also run the backward pass.

    Args:
        tensor, average, name: as for :func:`allreduce_async`.
        compression: one of ``hvd.Compression``, or a class with the same methods. Compresses the tensor before it is sent. All
            members must use the same.
        op, prescale_factor, postscale_factor, process_set: as for :func:`allreduce_async`. The default op is ``hvd.Average``.

    Returns:
        A new tensor of the same shape, dtype and device.

    Raises:
        TypeError, ValueError: as :func:`allreduce_async`; or ``compression`` is not a compressor of single tensors.
        HorovodInternalError: not initialised, the ranks disagree, or the job has failed.
    """
    reduction = checked_reduction(op, average, prescale_factor, postscale_factor, process_set)
    if compression is NoneCompressor and not tracked(tensor):
        result: torch.Tensor = _start(tensor, name, reduction, in_place=False, awaited=True).result()
        return result
    reduction = reduction.compressed_by(compression)
    return compressed(compression, [tensor], lambda sent: _reduced(_SINGLE, sent, name, reduction))[0]


@uncompiled
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
    """:func:`allreduce` of several tensors in one request. Differentiable.

    Every member must call it with the same number of tensors in the same order. The other arguments and the errors are those
    of :func:`allreduce`.

    Args:
        tensors: the tensors may differ in shape and dtype, and must be on one device.

    Returns:
        A list of new tensors in the order of ``tensors``.
    """
    reduction = checked_reduction(op, average, prescale_factor, postscale_factor, process_set).compressed_by(
        compression
    )
    return compressed(compression, tensors, lambda sent: _reduced(_GROUP, sent, name, reduction))
