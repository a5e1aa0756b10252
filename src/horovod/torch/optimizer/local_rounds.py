"""The outer parameters of an optimizer of PyTorch: tensors beside the parameters, and their reduction over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from horovod._bindings.reductions import ReductionArguments
from horovod.comm.reduction import ReduceOp
from horovod.comparison.alike import Value
from horovod.comparison.precision import Elements, precision_of
from horovod.core.lifecycle.process_set import global_process_set
from horovod.local_training.outer_rounds import OuterRounds, Wait
from horovod.torch.compression.bucket_compression import BucketCompressor, BucketReduction
from horovod.torch.ops.allreduce import grouped_allreduce_alike
from horovod.torch.ops.handles import synchronize
from horovod.torch.optimizer.bucket_sender import BucketCollectives
from horovod.torch.optimizer.buckets import ParameterState, errors_of

if TYPE_CHECKING:
    from horovod.torch.optimizer.local_settings import LocalSettings

_COMPARED = 8
"""How many elements of a parameter are compared."""


class TensorRounds(OuterRounds):
    """The outer parameters of one optimizer, in float32 for 16-bit parameters and otherwise in their own type.

    Args:
        settings: of the optimizer.
        slots: the parameters; the dictionary of the optimizer's distributed part, which changes with the parameters.
        name: returns the name of the optimizer.
    """

    def __init__(self, settings: LocalSettings, slots: dict[torch.Tensor, ParameterState], name: Any) -> None:
        super().__init__(settings.schedule, settings.line)
        self._compression = settings.between_hosts
        self._slots = slots
        self._name = name

    @property
    def name(self) -> str:
        found: str = self._name()
        return found

    def sizes(self, trained: bool) -> dict[str, int]:
        """The number of elements of each parameter, or of those that are not frozen."""
        return {each.name: p.numel() for p, each in self._slots.items() if p.requires_grad or not trained}

    def local(self, names: Sequence[str]) -> list[torch.Tensor]:
        by_name = self._by_name()
        return [_widened(by_name[name].parameter.detach()) for name in names]

    @torch.no_grad()
    def continue_with(self, names: Sequence[str], values: Sequence[torch.Tensor]) -> None:
        by_name = self._by_name()
        for name, value in zip(names, values, strict=True):
            by_name[name].parameter.copy_(value)

    def copied(self, value: torch.Tensor) -> torch.Tensor:
        return value.detach().clone(memory_format=torch.contiguous_format)

    def start(self, label: str, names: Sequence[str], changes: Sequence[torch.Tensor]) -> Wait:
        sent = [torch.view_as_real(each) if each.dtype.is_complex else each for each in changes]
        waits = []
        for number, device in enumerate(sorted({each.device for each in sent}, key=str)):
            chosen = [place for place, each in enumerate(sent) if each.device == device]
            waits.append(
                (chosen, self._start(f"{label}.{number}", [names[i] for i in chosen], [sent[i] for i in chosen]))
            )

        def wait() -> list[torch.Tensor]:
            averages = list(sent)
            for chosen, each in waits:
                for place, average in zip(chosen, each(), strict=True):
                    averages[place] = average.to(sent[place].dtype)
            return [
                torch.view_as_complex(average) if change.dtype.is_complex else average
                for change, average in zip(changes, averages, strict=True)
            ]

        return wait

    def _start(self, label: str, names: Sequence[str], changes: Sequence[torch.Tensor]) -> Wait:
        """Start to average changes that are on one device."""
        compression = self._compression
        changes = [each.contiguous() for each in changes]
        if isinstance(compression, BucketCompressor):
            by_name = self._by_name()
            memory = {name: by_name[name].memory for name in names}
            collectives = BucketCollectives(label, ReduceOp.AVERAGE, global_process_set)
            reduction = BucketReduction(compression.reduce(dict(zip(names, changes, strict=True)), memory, collectives))

            def averaged() -> Sequence[torch.Tensor]:
                reduction.wait()
                return changes

            return averaged
        pairs = [compression.compress(each) for each in changes]
        sent = [each.contiguous() for each, _ in pairs]
        arguments = ReductionArguments(ReduceOp.AVERAGE).compressed_by(compression)
        by_name = self._by_name()
        slots = [by_name[name] for name in names]
        handle = grouped_allreduce_alike(
            sent, names, label, arguments, "local training", lambda: errors_of(slots, sent)
        )

        def decompressed() -> Sequence[torch.Tensor]:
            received = synchronize(handle)
            return [compression.decompress(each, pair[1]) for each, pair in zip(received, pairs, strict=True)]

        return decompressed

    def elements(self, value: torch.Tensor) -> Value:
        flat = value.detach().reshape(-1)
        chosen = flat[:: max(1, flat.numel() // _COMPARED)][:_COMPARED].cpu().tolist()
        kind = str(value.dtype).removeprefix("torch.")
        return repr(chosen) if precision_of(kind) is None else Elements(kind, tuple(chosen), exact=False)

    def _by_name(self) -> dict[str, ParameterState]:
        return {each.name: each for each in self._slots.values()}


def _widened(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.float32) if value.dtype in (torch.float16, torch.bfloat16) else value
