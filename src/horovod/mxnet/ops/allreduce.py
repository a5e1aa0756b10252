"""allreduce and its grouped form, into new arrays or in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.core.negotiation.messages import Operation
from horovod.core.submission.collectives import prepared_call
from horovod.mxnet.ops.arguments import MXNetReductionArguments, reducing
from horovod.mxnet.ops.arrays import empty
from horovod.mxnet.ops.errors import of_both_kinds
from horovod.mxnet.ops.submission import in_place, specs, submit, to_new

PREFIX = "horovod_allreduce"


def _start(reads: Sequence[Any], writes: Sequence[Any], name: str | None, reduction: MXNetReductionArguments) -> None:
    tensors = specs(reads, name or PREFIX)
    call = prepared_call(
        Operation.ALLREDUCE,
        PREFIX,
        name,
        tensors,
        reduction.op,
        reduction.prescale,
        reduction.postscale,
        compression=reduction.form,
    )
    submit(reduction.process_set, call.request, reads, writes, reduction.priority)


def _reduced(arrays: Sequence[Any], name: str | None, reduction: MXNetReductionArguments) -> list[Any]:
    def act(sources: list[Any]) -> list[Any]:
        results = [empty(source.shape, source) for source in sources]
        _start(sources, results, name, reduction)
        return results

    specs(arrays, name or PREFIX)  # check before anything is copied
    return to_new(arrays, act)


def _reduce(arrays: Sequence[Any], name: str | None, reduction: MXNetReductionArguments) -> None:
    specs(arrays, name or PREFIX)
    in_place(arrays, lambda hosts: _start(hosts, hosts, name, reduction))


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: Any = None,
) -> Any:
    """``postscale_factor * reduce(op, prescale_factor * tensor)`` over the ranks of ``process_set``, as a new NDArray.

    Every member must call it with the same name, shape, dtype, op and factors. It returns immediately. MXNet's engine starts
    the collective when ``tensor`` is computed. Reading the result waits for the collective.

    Args:
        tensor: an NDArray of float16, float32, float64, int8, uint8, int32 or int64.
        average: deprecated; use ``op``. True means ``hvd.Average``, False ``hvd.Sum``.
        name: identifies the call. Unnamed calls are counted, so all members must make them in the same order.
        priority: the priority in MXNet's engine. Of the operations that are ready, those with a higher priority start earlier.
        prescale_factor, postscale_factor: each element is multiplied by the first before the reduction, and by the second
            afterwards.
        process_set: the ranks that reduce. This rank must be a member.
        op: ``hvd.Average`` (the default), ``Sum``, ``Min``, ``Max`` or ``Product``.

    Raises:
        ValueError, which is an MXNetError too: a bad argument, or this rank is not a member.
        HorovodInternalError, which is an MXNetError too: not initialised.
        TypeError: ``average`` is not a flag, or ``process_set`` is not a process set.
        AssertionError: ``op`` is Adasum.
        From ``wait_to_read()``, ``asnumpy()`` and everything that waits for the result: HorovodInternalError if the ranks
        disagree or the job has failed, ValueError if the name is still in use. Both are MXNetErrors too.
    """
    with of_both_kinds():
        reduction = reducing(op, average, prescale_factor, postscale_factor, process_set, priority)
        return _reduced([tensor], name, reduction)[0]


def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: Any = None,
) -> Any:
    """:func:`allreduce` in place, with the same arguments and errors. Returns ``tensor``.

    The content of ``tensor`` is undefined after a failure.
    """
    with of_both_kinds():
        reduction = reducing(op, average, prescale_factor, postscale_factor, process_set, priority)
        _reduce([tensor], name, reduction)
    return tensor


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: Any = None,
) -> Any:
    """:func:`allreduce` of several arrays in one request, with the same errors.

    Args:
        tensors: the arrays may differ in shape and dtype. Every member passes the same number of them in the same order.
        average, name, priority, prescale_factor, postscale_factor, process_set, op: as for :func:`allreduce`.

    Returns:
        A list of new arrays in the order of ``tensors``. An empty list is returned unchanged.
    """
    if not tensors:
        return tensors
    with of_both_kinds():
        reduction = reducing(op, average, prescale_factor, postscale_factor, process_set, priority)
        return _reduced(list(tensors), name, reduction)


def grouped_allreduce_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: Any = None,
) -> Any:
    """:func:`grouped_allreduce` in place, with the same arguments and errors. Returns ``tensors``.

    The content of the arrays is undefined after a failure.
    """
    if not tensors:
        return tensors
    with of_both_kinds():
        reduction = reducing(op, average, prescale_factor, postscale_factor, process_set, priority)
        _reduce(list(tensors), name, reduction)
    return tensors
