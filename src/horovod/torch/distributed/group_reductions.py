"""The reductions of c10d as collectives of the core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from horovod._bindings.reductions import ReductionArguments
from horovod.comm.reduction import ReduceOp
from horovod.core.negotiation.messages import Operation
from horovod.core.requests.tensor import Tensor
from horovod.torch.distributed.arguments import (
    ArgumentError,
    as_list,
    c10d,
    equally_many,
    for_each_rank,
    listed,
    nested,
    only,
    options_of,
    root_of,
    root_tensor_of,
    same_kind,
    same_types,
)
from horovod.torch.distributed.flat_tensors import apart, as_flat, flat, writes_back
from horovod.torch.distributed.sparse import allreduce_sparse
from horovod.torch.distributed.submission import Submitter, checked_reduction
from horovod.torch.distributed.work import HorovodWork
from horovod.torch.tensors import plain_view
from horovod.torch.uncompiled import uncompiled

Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_ALLREDUCE_OPTIONS = c10d.AllreduceOptions


@uncompiled
class Reductions:
    """The reductions of a group. The subclass makes ``_submitter``."""

    _submitter: Submitter

    def allreduce(
        self,
        tensors: Any = None,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        tensor: torch.Tensor | None = None,
        op: Any = None,
    ) -> HorovodWork:
        """Reduce a tensor over the ranks, in place. Several tensors get one result: the reduction over all of all ranks."""
        # What PyTorch passes itself needs no conversion.
        if opts.__class__ is not _ALLREDUCE_OPTIONS:
            opts = options_of(_ALLREDUCE_OPTIONS, opts, op, timeout)
        if tensors.__class__ is not list:
            tensors = as_list(tensors, tensor)
        reduction = checked_reduction(opts.reduceOp)
        combine = _COMBINED.get(reduction.op)
        if len(tensors) != 1:
            same_kind("all_reduce", listed("all_reduce", tensors))
            if combine is None:
                raise ArgumentError("all_reduce: ReduceOp.AVG takes one tensor in each call")
        if tensors[0].layout is torch.sparse_coo:
            return allreduce_sparse(self._submitter, tensors, reduction, opts)
        if len(tensors) > 1 and combine is not None:
            return self._allreduce_several(tensors, combine, reduction, opts)
        return self._submitter.reduce("all_reduce", tensors, reduction, opts)

    def _allreduce_several(
        self, tensors: Sequence[torch.Tensor], combine: Combine, reduction: ReductionArguments, opts: Any
    ) -> HorovodWork:
        whole = flat(tensors[0], reduced=True).clone()
        for each in tensors[1:]:
            combine(whole, flat(each, reduced=True))
        finish = writes_back(tensors, [whole] * len(tensors))
        return self._submitter.reduce("all_reduce", [whole], reduction, opts, results=tensors, finish=finish)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> HorovodWork:
        """Reduce each of several tensors over the ranks, in place."""
        opts = options_of(c10d.AllreduceCoalescedOptions, opts)
        tensors, reduction = listed("allreduce_coalesced", tensors), checked_reduction(opts.reduceOp)
        return self._submitter.reduce("allreduce_coalesced", tensors, reduction, opts)

    def reduce(
        self,
        tensors: Any = None,
        opts: Any = None,
        op: Any = None,
        timeout: timedelta | None = None,
        *,
        tensor: torch.Tensor | None = None,
        root: int | None = None,
    ) -> HorovodWork:
        opts = options_of(c10d.ReduceOptions, opts, root, op, timeout)
        found = only("reduce", "tensor", as_list(tensors, tensor))
        root_tensor_of("reduce", opts, [found])
        at, reduction = root_of("reduce", opts, self._submitter.size), checked_reduction(opts.reduceOp)
        return self._submitter.reduce("reduce", [found], reduction, opts, at)

    def reduce_scatter_single(
        self, outputTensor: torch.Tensor, inputTensor: torch.Tensor, opts: Any = None
    ) -> HorovodWork:
        opts = options_of(c10d.ReduceScatterOptions, opts)
        size, reduction = self._submitter.size, checked_reduction(opts.reduceOp)
        source, target = plain_view(inputTensor), plain_view(outputTensor)
        if (
            source is not None
            and target is not None
            and source.data_type is target.data_type
            and source.array.size == target.array.size * size > 0
        ):
            rows = Tensor(source.array, source.data_type, (size, target.array.size))
            return self._submitter.start(
                "reduce_scatter", Operation.REDUCESCATTER, [rows], [target], [outputTensor], opts, reduction
            )
        return self.reduce_scatter_single_coalesced([outputTensor], [inputTensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> HorovodWork:
        opts = options_of(c10d.ReduceScatterOptions, opts)
        submitter, reduction = self._submitter, checked_reduction(opts.reduceOp)
        outputs, inputs = listed("reduce_scatter", outputs), listed("reduce_scatter", inputs)
        equally_many("reduce_scatter", outputs, inputs)
        for output, source in zip(outputs, inputs, strict=True):
            same_types("reduce_scatter", [output], source)
            if output.numel() * submitter.size != source.numel():
                raise ArgumentError(
                    f"reduce_scatter: an input of {source.numel()} elements does not divide into {submitter.size} outputs of "
                    f"{output.numel()}"
                )
        sources = [
            flat(source, reduced=True).view(submitter.size, -1) if source.numel() else flat(source) for source in inputs
        ]
        targets = apart([flat(output, reduced=True) for output in outputs])
        memory = submitter.memory_of(sources, reduction)
        return submitter.start(
            "reduce_scatter",
            Operation.REDUCESCATTER,
            memory.read(sources),
            memory.write(targets),
            outputs,
            opts,
            reduction,
            finish=writes_back(outputs, targets),
            memory=memory,
        )

    def reduce_scatter(
        self,
        output_tensors: Any = None,
        input_tensors: Any = None,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        output: torch.Tensor | None = None,
        input: Any = None,
        op: Any = None,
    ) -> HorovodWork:
        opts, submitter = options_of(c10d.ReduceScatterOptions, opts, op, timeout), self._submitter
        output = only("reduce_scatter", "output tensor", as_list(output_tensors, output))
        parts = only("reduce_scatter", "input", nested(input_tensors, input))
        for_each_rank("reduce_scatter", "input", parts, submitter.size)
        same_types("reduce_scatter", parts, output)
        if parts[submitter.index].numel() != output.numel():
            raise ArgumentError(
                f"reduce_scatter: the output has {output.numel()} elements, but this rank's input has "
                f"{parts[submitter.index].numel()}"
            )
        if all(part.numel() == parts[0].numel() for part in parts):
            return self.reduce_scatter_single(output, as_flat(parts, output), opts)
        return self._reduce_scatter_uneven(output, parts, opts)

    def _reduce_scatter_uneven(self, output: torch.Tensor, parts: Sequence[torch.Tensor], opts: Any) -> HorovodWork:
        """Reduce-scatter of parts of different sizes, which the core does not support: an allreduce of all parts together."""
        whole = as_flat(parts, output)
        start = sum(part.numel() for part in parts[: self._submitter.index])
        reduction = checked_reduction(opts.reduceOp)
        finish = writes_back([output], [whole[start : start + output.numel()]])
        return self._submitter.reduce("reduce_scatter", [whole], reduction, opts, results=[output], finish=finish)

    # Older names of the same operations.

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


_COMBINED: dict[ReduceOp, Combine] = {
    ReduceOp.SUM: torch.Tensor.add_,
    ReduceOp.PRODUCT: torch.Tensor.mul_,
    ReduceOp.MIN: lambda whole, each: torch.minimum(whole, each, out=whole),
    ReduceOp.MAX: lambda whole, each: torch.maximum(whole, each, out=whole),
    ReduceOp.BAND: torch.Tensor.bitwise_and_,
    ReduceOp.BOR: torch.Tensor.bitwise_or_,
    ReduceOp.BXOR: torch.Tensor.bitwise_xor_,
}
"""How a rank reduces several tensors of its own, in place, in the first of them."""
