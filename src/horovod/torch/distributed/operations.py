"""Every operation of c10d as a collective of the core, under the names by which PyTorch calls a group.

PyTorch passes lists of tensors and an object of options. Some callers pass single tensors instead, and a root or an operation
instead of the options; each method takes both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from horovod.core.negotiation.messages import Operation
from horovod.torch.device.memory import host_memory, memory_of
from horovod.torch.distributed.plain import elements_of, results_into
from horovod.torch.distributed.sparse import allreduce_sparse
from horovod.torch.distributed.submission import (
    Submitter,
    as_flat,
    checked_reduction,
    flat,
    is_awaited,
    writes_back,
)
from horovod.torch.distributed.work import HorovodWork
from horovod.torch.ops.tensors import empty_like

Tensors = Sequence[torch.Tensor]


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _nested(lists: Any) -> list[Any]:
    """A list of lists of tensors; a single list of tensors becomes a list of one list."""
    lists = list(lists)
    return [lists] if lists and isinstance(lists[0], torch.Tensor) else lists


def _one(what: str, tensors: Sequence[Any]) -> Any:
    if len(tensors) != 1:
        raise ValueError(f"{what}: each process passes one tensor or one list of tensors per call, not {len(tensors)}")
    return tensors[0]


def _operation(options: Any) -> Any:
    """The reduction in the options, or the reduction that was passed instead of options; a sum if there is none."""
    if options is None:
        return dist.ReduceOp.SUM
    return getattr(options, "reduceOp", options)


def _root(options: Any) -> int:
    return int(getattr(options, "rootRank", options))


class Operations:
    """The operations of a group. The subclass makes ``_submitter``.

    Every rank of the group must call the same operations in the same order, with tensors of the same types. Each operation
    returns a work; the results are in the output tensors once its ``wait()`` has returned. Arguments that do not fit together
    raise ValueError on the rank that passes them.
    """

    _submitter: Submitter

    # Reductions

    def allreduce(self, tensors: Any, opts: Any = None, *_: Any, **given: Any) -> HorovodWork:
        tensors, how = _listed(tensors), checked_reduction(_operation(given.get("op", opts)))
        if tensors and tensors[0].layout is torch.sparse_coo:
            return allreduce_sparse(self._submitter, _one("allreduce", tensors), how, opts)
        if len(tensors) == 1 and (elements := elements_of(tensors[0])) is not None:
            (tensor,), vectors = tensors, [elements]
            work = self._submitter.start_plain(
                "allreduce", Operation.ALLREDUCE, tensor, elements.shape, vectors, vectors, tensor, opts, how
            )
            if work is not None:
                return work
        return self._submitter.reduce("allreduce", tensors, how, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> HorovodWork:
        return self._submitter.reduce(
            "allreduce_coalesced", _listed(tensors), checked_reduction(_operation(opts)), opts
        )

    def reduce(self, tensors: Any, opts: Any = 0, op: Any = None, *_: Any) -> HorovodWork:
        how = checked_reduction(_operation(op if op is not None else opts if hasattr(opts, "reduceOp") else None))
        return self._submitter.reduce("reduce", [_one("reduce", _listed(tensors))], how, opts, _root(opts))

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> HorovodWork:
        size, how = self._submitter.size, checked_reduction(_operation(opts))
        source, target = elements_of(input), elements_of(output)
        if (
            source is not None
            and target is not None
            and source.size == target.size * size > 0
            and output.dtype is input.dtype
        ):
            work = self._submitter.start_plain(
                "reduce_scatter",
                Operation.REDUCESCATTER,
                input,
                (size, target.size),
                [source],
                [target],
                output,
                opts,
                how,
            )
            if work is not None:
                return work
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> HorovodWork:
        submitter, how = self._submitter, checked_reduction(_operation(opts))
        for output, source in zip(outputs, inputs, strict=True):
            if output.numel() * submitter.size != source.numel():
                raise ValueError(
                    f"reduce_scatter: an input of {source.numel()} elements does not divide into {submitter.size} outputs of "
                    f"{output.numel()}"
                )
        sources = [
            flat(source, reduced=True).view(submitter.size, -1) if source.numel() else flat(source) for source in inputs
        ]
        targets = [flat(output, reduced=True) for output in outputs]
        memory = memory_of(sources, how)
        handle = submitter.submit(
            Operation.REDUCESCATTER, memory.read(sources), memory.write(targets), how=how, awaited=is_awaited(opts)
        )
        finish = writes_back(outputs, targets)
        return self._submitter.work(handle, memory, outputs, "reduce_scatter", finish, opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> HorovodWork:
        output, parts = _one("reduce_scatter", _listed(outputs)), _one("reduce_scatter", _nested(inputs))
        submitter = self._submitter
        if len(parts) != submitter.size:
            raise ValueError(f"reduce_scatter: {len(parts)} tensors for {submitter.size} ranks")
        if parts[submitter.index].numel() != output.numel():
            raise ValueError(
                f"reduce_scatter: the output has {output.numel()} elements, but this rank's input has "
                f"{parts[submitter.index].numel()}"
            )
        if all(part.numel() == parts[0].numel() for part in parts):
            return self.reduce_scatter_single(output, as_flat(parts, output), opts)
        return self._reduce_scatter_uneven(output, parts, opts)

    def _reduce_scatter_uneven(self, output: torch.Tensor, parts: Tensors, opts: Any) -> HorovodWork:
        """Reduce-scatter of parts of different sizes, which the core does not support: an allreduce of all parts together."""
        whole = as_flat(parts, output)
        start = sum(part.numel() for part in parts[: self._submitter.index])
        how = checked_reduction(_operation(opts))
        memory = memory_of([whole], how)
        read, written = memory.reduce([whole], [whole])
        handle = self._submitter.submit(Operation.ALLREDUCE, read, written, how=how, awaited=is_awaited(opts))
        finish = writes_back([output], [whole[start : start + output.numel()]])
        return self._submitter.work(handle, memory, [output], "reduce_scatter", finish, opts)

    # Data movement

    def broadcast(self, tensors: Any, opts: Any = 0, *_: Any) -> HorovodWork:
        tensors, root = _listed(tensors), _root(opts)
        if len(tensors) == 1 and (elements := elements_of(tensors[0])) is not None:
            work = self._submitter.start_plain(
                "broadcast",
                Operation.BROADCAST,
                tensors[0],
                elements.shape,
                (),
                [elements],
                tensors[0],
                opts,
                root=root,
            )
            if work is not None:
                return work
        targets = [flat(tensor) for tensor in tensors]
        memory = memory_of(targets)
        views = memory.read(targets) if self._submitter.index == root else memory.write(targets)
        handle = self._submitter.submit(Operation.BROADCAST, (), views, root=root, awaited=is_awaited(opts))
        finish = writes_back(tensors, targets)
        return self._submitter.work(handle, memory, tensors, "broadcast", finish, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> HorovodWork:
        return self.allgather_coalesced(_nested(outputs), _listed(inputs), opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> HorovodWork:
        for parts in outputs:
            if len(parts) != self._submitter.size:
                raise ValueError(f"allgather: {len(parts)} outputs for {self._submitter.size} ranks")
        targets = [_room(parts, source) for parts, source in zip(outputs, inputs, strict=True)]
        every = [part for parts in outputs for part in parts]
        pieces = [piece for parts, target in zip(outputs, targets, strict=True) for piece in _pieces(target, parts)]
        return self._submitter.gather("allgather", inputs, targets, every, opts, writes_back(every, pieces))

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> HorovodWork:
        source, target = elements_of(input), elements_of(output)
        if source is not None and target is not None and output.dtype is input.dtype:
            work = self._submitter.start_plain(
                "all_gather",
                Operation.ALLGATHER,
                input,
                source.shape,
                [source],
                (),
                output,
                opts,
                allocate=results_into(target),
            )
            if work is not None:
                return work
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> HorovodWork:
        targets = [flat(output) for output in outputs]
        return self._submitter.gather("all_gather", inputs, targets, outputs, opts, writes_back(outputs, targets))

    def gather(self, outputs: Any, inputs: Any, opts: Any = 0, *_: Any) -> HorovodWork:
        submitter, root = self._submitter, _root(opts)
        source = flat(_one("gather", _listed(inputs)))
        parts = _one("gather", _nested(outputs)) if submitter.index == root else []
        if submitter.index == root and len(parts) != submitter.size:
            raise ValueError(f"gather: {len(parts)} outputs for {submitter.size} ranks")
        target = _room(parts, source)
        splits = [source.numel() if rank == root else 0 for rank in range(submitter.size)]
        finish = writes_back(parts, _pieces(target, parts))
        return submitter.exchange("gather", source, splits, target, parts, opts, finish, root)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = 0, *_: Any) -> HorovodWork:
        submitter, root = self._submitter, _root(opts)
        output = _one("scatter", _listed(outputs))
        parts = _one("scatter", _nested(inputs)) if submitter.index == root else []
        if submitter.index == root and len(parts) != submitter.size:
            raise ValueError(f"scatter: {len(parts)} inputs for {submitter.size} ranks")
        target = flat(output)
        splits = [part.numel() for part in parts] or [0] * submitter.size
        finish = writes_back([output], [target])
        return submitter.exchange("scatter", as_flat(parts, output), splits, target, [output], opts, finish, root)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> HorovodWork:
        submitter = self._submitter
        if len(inputs) != submitter.size or len(outputs) != submitter.size:
            raise ValueError(f"all_to_all: {len(inputs)} inputs and {len(outputs)} outputs for {submitter.size} ranks")
        target = _room(outputs, outputs[0])
        finish = writes_back(outputs, _pieces(target, outputs))
        splits = [part.numel() for part in inputs]
        return submitter.exchange("all_to_all", as_flat(inputs, inputs[0]), splits, target, outputs, opts, finish)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        *_: Any,
    ) -> HorovodWork:
        size = self._submitter.size
        work = self._all_to_all_evenly(output, input, opts) if not (output_split_sizes or input_split_sizes) else None
        if work is not None:
            return work
        target = flat(output)
        rows = [tensor.shape[0] if tensor.dim() else 1 for tensor in (input, output)]
        for name, splits, count in zip(("input", "output"), (input_split_sizes, output_split_sizes), rows, strict=True):
            if splits and (len(splits) != size or sum(splits) != count):
                raise ValueError(f"all_to_all_single: {name} splits {list(splits)} of {count} rows for {size} ranks")
            if not splits and count % size:
                raise ValueError(
                    f"all_to_all_single: {count} {name} rows do not divide among {size} ranks; pass splits"
                )
        source = flat(input)
        if rows[0]:
            source = source.view(rows[0], -1) if source.numel() else source.view(rows[0], 0)
        splits = list(input_split_sizes) or [rows[0] // size] * size
        finish = writes_back([output], [target])
        return self._submitter.exchange("all_to_all_single", source, splits, target, [output], opts, finish)

    def _all_to_all_evenly(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> HorovodWork | None:
        """Alltoall of plain tensors without splits, on the shorter path; None if it does not apply."""
        size = self._submitter.size
        source, target = elements_of(input), elements_of(output)
        if source is None or target is None or not source.size or output.dtype is not input.dtype:
            return None
        rows = input.shape[0] if input.dim() else 1
        if rows % size or (output.shape[0] if output.dim() else 1) % size:
            return None  # all_to_all_single() raises the error
        row_elements = source.size // rows
        return self._submitter.start_plain(
            "all_to_all_single",
            Operation.ALLTOALL,
            input,
            (rows, row_elements),
            [source],
            (),
            output,
            opts,
            splits=(rows // size,) * size,
            allocate=results_into(target, row_elements),
        )

    def barrier(self, opts: Any = None) -> HorovodWork:
        handle = self._submitter.submit(Operation.BARRIER, (), awaited=is_awaited(opts))
        return self._submitter.work(handle, host_memory, [], "barrier", None, opts)

    # Old names that some functions of PyTorch still call.

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> HorovodWork:
        return self.all_gather_single(output, input, opts)

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> HorovodWork:
        return self.reduce_scatter_single(output, input, opts)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> HorovodWork:
        return self.all_gather_single_coalesced(outputs, inputs, opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> HorovodWork:
        return self.reduce_scatter_single_coalesced(outputs, inputs, opts)

    def alltoall_base(self, *arguments: Any) -> HorovodWork:
        return self.all_to_all_single(*arguments)


def _room(parts: Tensors, like: torch.Tensor) -> torch.Tensor:
    """A flat tensor for results of the total size of ``parts``: the memory of a single part, otherwise new memory, from which
    the results are then copied to ``parts``."""
    elements = sum(part.numel() for part in parts)
    source = flat(like)
    if len(parts) == 1:
        return flat(parts[0])
    return empty_like(source.new_empty(elements))


def _pieces(target: torch.Tensor, parts: Tensors) -> list[torch.Tensor]:
    return list(torch.split(target, [part.numel() for part in parts])) if parts else []
