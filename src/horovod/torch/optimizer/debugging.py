"""The checks of ``HOROVOD_DEBUG`` in the steps of an optimizer: gradients that are not finite, parameters that drift apart,
equal batches on several ranks, and samplers with different seeds.

Without ``HOROVOD_DEBUG``, none of these checks runs. With it, ranks compare after each of the first steps, and then after every
``HOROVOD_DEBUG_STEPS`` steps.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import torch

from horovod.comparison.alike import Alike, compare, made_at
from horovod.comparison.comparison import Comparison
from horovod.comparison.training_mistakes import (
    FIRST_STEPS,
    NotFinite,
    account_of_batches,
    account_of_gradient,
    same_in_all,
)
from horovod.comparison.training_mistakes import digest as digest_of_bytes
from horovod.core.lifecycle.context import running
from horovod.core.lifecycle.process_set import ProcessSet
from horovod.torch.optimizer.buckets import ParameterState
from horovod.torch.optimizer.data_loading import Batches, loaded

_log = logging.getLogger("horovod.torch")

_LAST_OF_FIRST = 10
"""The last step at which batches are compared, even if a data loader has delivered batches in too few steps until then."""


class StepDebugger:
    """The checks of one optimizer on this rank.

    Args:
        name: the name of the optimizer, the same on all ranks.
        process_set: the ranks that train together.
        line: the line of the script that made the optimizer.
    """

    def __init__(self, name: str, process_set: ProcessSet, line: str) -> None:
        self._name, self._set, self._line = name, process_set, line
        self._steps = 0
        self._infinite = False
        self._reported: set[Alike] = set()
        self._rows: list[Mapping[int, bytes]] = []  # by step with batches, what each rank has loaded

    def gradient(self, slot: ParameterState, gradient: torch.Tensor | None) -> None:
        """Check a gradient before it is reduced. Warns about the first one that is not finite."""
        if self._infinite or gradient is None:
            return
        values = gradient.detach()
        if values.layout is not torch.strided:
            values = values.coalesce().values()
        finite = torch.isfinite(values)
        if bool(finite.all()):
            return
        self._infinite = True
        nan = int(torch.isnan(values).sum())
        count = values.numel() - int(finite.sum())
        found = NotFinite(values.numel(), nan, count - nan)
        rank, step, owner = running().identity.rank, self._steps + 1, made_at(self._line)
        _log.warning(account_of_gradient(rank, slot.name, step, owner, found))

    def after_step(self, slots: Iterable[ParameterState]) -> None:
        """Compare with the other ranks. Every rank of the process set must call it after each step.

        Raises:
            MismatchError: values differ that must be equal, and ``HOROVOD_CHECK=error``.
        """
        self._steps += 1
        batches = loaded.take()
        first = len(self._rows) < FIRST_STEPS and self._steps <= _LAST_OF_FIRST
        if not first and self._steps % running().config.debug_steps:
            return
        self._compare(Alike.DRIFT, {slot.name: digest(slot.parameter) for slot in slots})
        self._compare(Alike.SAMPLERS, {"sampler": batches.sampler} if batches.sampler else {})
        if first:
            self._compare_batches(batches)

    def _compare(self, what: Alike, held: Mapping[str, str]) -> None:
        if what not in self._reported and not compare(what, held, self._name, self._set.process_set_id, self._line):
            self._reported.add(what)

    def _compare_batches(self, batches: Batches) -> None:
        """Warn if ranks have loaded the same batches in all of the first steps."""
        held = batches.digest
        rows = Comparison(f"{self._name}.batches", held, self._set.process_set_id, self._line, awaited=True).wait()
        rows = rows if rows is not None else dict.fromkeys(self._set.ranks or (), held)
        if any(rows.values()):
            self._rows.append(rows)
        if len(self._rows) < FIRST_STEPS:
            return
        for group in same_in_all(self._rows):
            if running().identity.rank == group[0]:
                _log.warning(account_of_batches(group, _WHAT % (batches.line, group[0]), _ADVICE))


_WHAT = f"have loaded the same batches in the first {FIRST_STEPS} steps, at %s on rank %d"
_ADVICE = "torch.utils.data.DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())"


def digest(tensor: torch.Tensor) -> str:
    """The digest of all bytes of a tensor, read from its device."""
    content = tensor.detach().contiguous().reshape(-1)
    if content.layout is torch.strided and not content.is_quantized:
        content = content.resolve_conj().view(torch.uint8)
    return digest_of_bytes(content.cpu().numpy().tobytes())


def debugger(name: str, process_set: ProcessSet, line: str) -> StepDebugger | None:
    """The checks of an optimizer in the running generation; None without ``HOROVOD_DEBUG``."""
    context = running()
    if not context.config.debug or len(process_set.ranks or ()) < 2:
        return None
    loaded.wanted = True
    loaded.take()  # earlier batches belong to no step of this optimizer
    return StepDebugger(name, process_set, line)
