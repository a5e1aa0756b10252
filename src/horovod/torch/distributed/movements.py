"""The operations of c10d that move data without reducing it, as collectives of the core."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from horovod.core.negotiation.messages import Operation
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
from horovod.torch.distributed.flat_tensors import (
    apart,
    divided,
    flat,
    results_into,
    small_views,
    writes_back,
)
from horovod.torch.distributed.submission import Submitter
from horovod.torch.distributed.work import HorovodWork
from horovod.torch.tensors import empty_like, plain_view
from horovod.torch.uncompiled import uncompiled

Tensors = Sequence[torch.Tensor]


@uncompiled
class Movements:
    """The operations of a group that move data without reducing it. The subclass makes ``_submitter``."""

    _submitter: Submitter

    def broadcast(
        self,
        tensors: Any = None,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        tensor: torch.Tensor | None = None,
        root: int | None = None,
    ) -> HorovodWork:
        """Copy the root's tensor to all ranks. Of several tensors the root sends one (``rootTensor``); all get its values."""
        submitter, opts = self._submitter, options_of(c10d.BroadcastOptions, opts, root, timeout)
        tensors, at = as_list(tensors, tensor), root_of("broadcast", opts, submitter.size)
        which = root_tensor_of("broadcast", opts, tensors)
        if len(tensors) > 1:
            same_kind("broadcast", tensors)
        elif (view := plain_view(tensors[0])) is not None:
            return submitter.start("broadcast", Operation.BROADCAST, (), [view], tensors, opts, root=at)
        target = flat(tensors[which])
        memory = submitter.memory_of([target])
        views = memory.read([target]) if submitter.index == at else memory.write([target])
        finish = writes_back(tensors, [target] * len(tensors))
        return submitter.start(
            "broadcast", Operation.BROADCAST, (), views, tensors, opts, root=at, finish=finish, memory=memory
        )

    def allgather(
        self,
        output_tensors: Any = None,
        input_tensors: Any = None,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        input_tensor: torch.Tensor | None = None,
    ) -> HorovodWork:
        """Gather tensors on all ranks. Of ``n`` inputs, input ``j`` of a rank is in each output list at ``rank * n + j``."""
        submitter, opts = self._submitter, options_of(c10d.AllgatherOptions, opts, timeout)
        inputs, lists = listed("all_gather", input_tensors, input_tensor, "input tensor"), nested(output_tensors)
        equally_many("all_gather", lists, inputs)
        same_kind("all_gather", inputs)
        count = len(inputs)
        for index, parts in enumerate(lists):
            if len(parts) != submitter.size * count:
                raise ArgumentError(
                    f"all_gather: invalid output tensor list at index {index} (expected length {submitter.size * count}, got "
                    f"{len(parts)})"
                )
        if count > 1:
            same_kind("all_gather", [part for parts in lists for part in parts])
        by_input = [[part for parts in lists for part in parts[index::count]] for index in range(count)]
        return self._allgather("all_gather", by_input, inputs, opts).of_lists(lists)

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> HorovodWork:
        """Gather several tensors on all ranks: the input ``j`` of a rank is in ``output_lists[rank][j]``."""
        opts = options_of(c10d.AllgatherOptions, opts)
        lists, inputs = nested(output_lists), listed("allgather_coalesced", input_list)
        if len(lists) != self._submitter.size:
            raise ArgumentError(
                f"allgather_coalesced: output lists should be equal to world size {self._submitter.size}, not {len(lists)}"
            )
        for parts in lists:
            if len(parts) != len(inputs):
                raise ArgumentError(
                    f"allgather_coalesced: invalid output size: (expected length {len(inputs)}, got {len(parts)})"
                )
        by_input = [[parts[index] for parts in lists] for index in range(len(inputs))]
        return self._allgather("allgather_coalesced", by_input, inputs, opts).of_lists(lists)

    def _allgather(self, what: str, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> HorovodWork:
        """Gather the inputs on all ranks. ``outputs[j]`` are the outputs for input j: one for each rank, perhaps several times
        over."""
        size, index = self._submitter.size, self._submitter.index
        for parts, source in zip(outputs, inputs, strict=True):
            same_types(what, parts, source)
            if parts[index].numel() != source.numel():
                raise ArgumentError(
                    f"{what}: invalid tensor size at index {index} (expected {source.numel()} elements, as in this rank's "
                    f"input, got {parts[index].numel()})"
                )
        if len(inputs) == 1 and (small := small_views([*inputs, *outputs[0]])) is not None:
            target, finish = divided(small[1:], small[0])
            allocate = results_into(target)
            return self._submitter.start(
                what, Operation.ALLGATHER, small[:1], (), outputs[0], opts, allocate=allocate, finish=finish
            )
        targets = [_room(parts[:size], source) for parts, source in zip(outputs, inputs, strict=True)]
        every = [part for parts in outputs for part in parts]
        pieces = [
            piece
            for target, parts in zip(targets, outputs, strict=True)
            for piece in _pieces(target, parts[:size]) * (len(parts) // size)
        ]
        return self._submitter.gather(what, inputs, targets, every, opts, writes_back(every, pieces))

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> HorovodWork:
        opts = options_of(c10d.AllgatherOptions, opts)
        source, target = plain_view(input), plain_view(output)
        if source is not None and target is not None and source.data_type is target.data_type:
            allocate = results_into(target.array)
            return self._submitter.start(
                "all_gather", Operation.ALLGATHER, [source], (), [output], opts, allocate=allocate
            )
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> HorovodWork:
        opts = options_of(c10d.AllgatherOptions, opts)
        outputs, inputs = listed("all_gather", outputs), listed("all_gather", inputs)
        equally_many("all_gather", outputs, inputs)
        for output, source in zip(outputs, inputs, strict=True):
            same_types("all_gather", [output], source)
        targets = apart([flat(output) for output in outputs])
        return self._submitter.gather("all_gather", inputs, targets, outputs, opts, writes_back(outputs, targets))

    def gather(
        self,
        output_tensors: Any = None,
        input_tensors: Any = None,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        input_tensor: torch.Tensor | None = None,
        root: int | None = None,
    ) -> HorovodWork:
        submitter, opts = self._submitter, options_of(c10d.GatherOptions, opts, root, timeout)
        at = root_of("gather", opts, submitter.size)
        tensor = only("gather", "input tensor", as_list(input_tensors, input_tensor))
        parts = self._at_root("gather", "output", nested(output_tensors), at)
        same_types("gather", parts, tensor)
        sent = self._only_at(at, tensor.numel())
        return submitter.exchange("gather", [tensor], sent, parts, _sizes(parts), opts, at)

    def scatter(
        self,
        output_tensors: Any = None,
        input_tensors: Any = None,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        output_tensor: torch.Tensor | None = None,
        root: int | None = None,
    ) -> HorovodWork:
        submitter, opts = self._submitter, options_of(c10d.ScatterOptions, opts, root, timeout)
        at = root_of("scatter", opts, submitter.size)
        output = only("scatter", "output tensor", as_list(output_tensors, output_tensor))
        parts = self._at_root("scatter", "input", nested(input_tensors), at)
        same_types("scatter", parts, output)
        sent, received = _sizes(parts) or [0] * submitter.size, self._only_at(at, output.numel())
        return submitter.exchange("scatter", parts, sent, [output], received, opts, at)

    def _only_at(self, root: int, elements: int) -> list[int]:
        """By rank: so many elements to or from the root, and none to or from other ranks."""
        return [elements if rank == root else 0 for rank in range(self._submitter.size)]

    def _at_root(self, what: str, which: str, lists: Sequence[Tensors], root: int) -> Tensors:
        """The tensors that only the root passes, one for each rank; none on other ranks."""
        if self._submitter.index == root:
            return for_each_rank(what, which, only(what, which, lists), self._submitter.size)
        if any(lists):
            raise ArgumentError(f"{what}: requires empty {which} on non-root: rank {root} is the root")
        return []

    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> HorovodWork:
        submitter, opts = self._submitter, options_of(c10d.AllToAllOptions, opts)
        inputs, outputs = listed("all_to_all", input_tensors), listed("all_to_all", output_tensors)
        for which, tensors in (("input", inputs), ("output", outputs)):
            same_types("all_to_all", for_each_rank("all_to_all", which, tensors, submitter.size), inputs[0])
        return submitter.exchange("all_to_all", inputs, _sizes(inputs), outputs, _sizes(outputs), opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> HorovodWork:
        """Send rows of the input to all ranks. A rank without rows may pass an empty tensor of any shape."""
        opts = options_of(c10d.AllToAllOptions, opts, timeout)
        same_types("all_to_all_single", [output], input)
        sent = self._elements("input", input, input_split_sizes)
        received = self._elements("output", output, output_split_sizes)
        return self._submitter.exchange("all_to_all_single", [input], sent, [output], received, opts)

    def _elements(self, which: str, tensor: torch.Tensor, splits: Sequence[int]) -> list[int]:
        """The number of elements for each rank, if ``splits`` has the numbers of rows, or if all get equally many."""
        size, rows = self._submitter.size, tensor.shape[0] if tensor.dim() else 1
        if splits and (len(splits) != size or sum(splits) != rows or min(splits) < 0):
            raise ArgumentError(f"all_to_all_single: {which} splits {list(splits)} of {rows} rows for {size} ranks")
        if not splits and rows % size:
            raise ArgumentError(f"all_to_all_single: {rows} {which} rows do not divide among {size} ranks; pass splits")
        elements = tensor.numel() // rows if rows else 0
        return [each * elements for each in splits or [rows // size] * size]

    # Older names of the same operations.

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single


def _room(parts: Tensors, like: torch.Tensor) -> torch.Tensor:
    """A flat tensor for results of the total size of ``parts``: the memory of a single part, otherwise new memory, from which
    the results are then copied to ``parts``."""
    elements = sum(part.numel() for part in parts)
    source = flat(like)
    if len(parts) == 1:
        return flat(parts[0])
    return empty_like(source.new_empty(elements))


def _pieces(target: torch.Tensor, parts: Tensors) -> list[torch.Tensor]:
    return list(torch.split(target, _sizes(parts))) if parts else []


def _sizes(parts: Tensors) -> list[int]:
    return [part.numel() for part in parts]
