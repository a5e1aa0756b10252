"""reducescatter and its grouped form: they reduce over the ranks, and each rank keeps its rows of the result. They block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod._bindings.reductions import Average, Sum
from horovod.core.lifecycle.context import worker_of
from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.core.negotiation.messages import Operation
from horovod.core.requests.batch import shard_rows
from horovod.core.submission import collectives
from horovod.mxnet.ops.arguments import MXNetReductionArguments, reducing
from horovod.mxnet.ops.arrays import empty, view
from horovod.mxnet.ops.errors import of_both_kinds
from horovod.mxnet.ops.submission import reading, specs, to_new

PREFIX = "horovod_reducescatter"


def _scatter(arrays: Sequence[Any], name: str | None, reduction: MXNetReductionArguments) -> list[Any]:
    for spec in specs(arrays, name or PREFIX):
        if not spec.shape:
            raise ValueError(f"reducescatter does not support scalar inputs: {name or PREFIX!r}")
    set_id = reduction.process_set.process_set_id

    def act(sources: list[Any]) -> list[Any]:
        worker = worker_of(set_id, Operation.REDUCESCATTER)
        rows = [shard_rows(source.shape[0], len(worker.ranks))[worker.index] for source in sources]
        results = [empty((mine, *source.shape[1:]), source) for mine, source in zip(rows, sources, strict=True)]
        outputs = [view(result) for result in results]
        with reading(sources, name or PREFIX) as inputs:
            collectives.reducescatter(PREFIX, name, inputs, outputs, *reduction.positional, awaited=True).wait()
        return results

    return to_new(arrays, act)


def _checked(
    op: Any, prescale_factor: float, postscale_factor: float, process_set: ProcessSet, priority: int
) -> MXNetReductionArguments:
    if op not in (Average, Sum):
        raise AssertionError(f"reducescatter takes op=hvd.Average or hvd.Sum, not {op!r}")
    return reducing(op, None, prescale_factor, postscale_factor, process_set, priority)


def reducescatter(
    tensor: Any,
    op: Any = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """This rank's rows of the reduction of ``tensor``, as a new NDArray. Every member must call it. It blocks.

    Of n rows over s ranks, each rank keeps n // s, and the first n % s ranks keep one more. Name, shape, dtype, op and factors
    must agree.

    Args:
        tensor: an NDArray of at least one dimension, of a dtype as for :func:`horovod.mxnet.ops.allreduce.allreduce`.
        op: ``hvd.Average`` or ``hvd.Sum``.
        name: identifies the call. Calls without a name are matched by their order.
        priority: accepted for compatibility. The call blocks in any case.
        process_set: the ranks that reduce. This rank must be a member.
        prescale_factor, postscale_factor: each element is multiplied by the first before the reduction, and by the second
            afterwards.

    Raises:
        AssertionError: another ``op``.
        ValueError: an array without dimensions. Otherwise as :func:`horovod.mxnet.ops.allgather.allgather`.
    """
    with of_both_kinds():
        return _scatter([tensor], name, _checked(op, prescale_factor, postscale_factor, process_set, priority))[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    op: Any = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """:func:`reducescatter` of several arrays in one request, with the same errors.

    Args:
        tensors: the arrays may differ in shape and dtype. Every member passes the same number of them in the same order.
        op, name, priority, process_set, prescale_factor, postscale_factor: as for :func:`reducescatter`.

    Returns:
        A list of new arrays in the order of ``tensors``. An empty list is returned unchanged.
    """
    if not tensors:
        return tensors
    with of_both_kinds():
        return _scatter(list(tensors), name, _checked(op, prescale_factor, postscale_factor, process_set, priority))
