"""The checks of ``HOROVOD_DEBUG`` in the steps of an optimizer: gradients that are not finite, parameters that drift apart,
equal batches on several ranks, and samplers with different seeds.

Nothing here runs without it. With it, ranks compare after each of the first steps, and then after every
``HOROVOD_DEBUG_STEPS`` steps.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping

import torch

from horovod.common.alike import Alike, compare
from horovod.common.consensus import Consensus
from horovod.core.config import DEBUG
from horovod.core.lifecycle.context import running
from horovod.core.lifecycle.process_set import ProcessSet
from horovod.torch.optimizer.buckets import Slot
from horovod.torch.optimizer.data_loading import Batches, loaded

_log = logging.getLogger("horovod.torch")

_FIRST_STEPS = 3
"""The number of steps with batches after which ranks with equal batches in all of them are reported."""
_LAST_OF_FIRST = 10
"""The number of steps after which no batch is expected any more."""


class StepDebugger:
    """The checks of one optimizer on this rank.

    Args:
        name: of the optimizer, the same on all ranks.
        line: the line of the script that made it.
    """

    def __init__(self, name: str, process_set: ProcessSet, line: str) -> None:
        self._name, self._set, self._line = name, process_set, line
        self._steps = 0
        self._infinite = False
        self._told: set[Alike] = set()
        self._alike: list[list[list[int]]] = []  # in each of the first steps, the ranks that had the same batches

    def gradient(self, slot: Slot, gradient: torch.Tensor | None) -> None:
        """Check a gradient before it is reduced. The first that is not finite is reported."""
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
        _log.warning(
            "rank %d: the gradient of %r is not finite in step %d of the optimizer made at %s: of %d elements %d are NaN and "
            "%d are infinite. It is the first of this rank, in the order of backward. With a gradient scaler single steps may "
            "have infinite gradients: the scaler skips them.",
            running().identity.rank,
            slot.name,
            self._steps + 1,
            self._line,
            values.numel(),
            nan,
            count - nan,
        )

    def after_step(self, slots: Iterable[Slot]) -> None:
        """Compare with the other ranks. Every rank of the process set must call it after each step.

        Raises:
            MismatchError: something differs that must not, and ``HOROVOD_CHECK=error``.
        """
        self._steps += 1
        batches = loaded.take()
        first = len(self._alike) < _FIRST_STEPS and self._steps <= _LAST_OF_FIRST
        if not first and self._steps % running().config.debug_steps:
            return
        self._compare(Alike.DRIFT, {slot.name: digest(slot.parameter) for slot in slots})
        self._compare(Alike.SAMPLERS, {"sampler": batches.sampler} if batches.sampler else {})
        if first:
            self._compare_batches(batches)

    def _compare(self, what: Alike, held: Mapping[str, str]) -> None:
        if what not in self._told and not compare(what, held, self._name, self._set.process_set_id, self._line):
            self._told.add(what)

    def _compare_batches(self, batches: Batches) -> None:
        """Warn if ranks have loaded the same batches in all of the first steps."""
        held = batches.digest
        rows = Consensus(f"{self._name}.batches", held, self._set.process_set_id, self._line).wait()
        ranks = list(self._set.ranks or ())
        by_digest: dict[bytes, list[int]] = {}
        for rank, row in (rows if rows is not None else dict.fromkeys(ranks, held)).items():
            if row:
                by_digest.setdefault(row, []).append(rank)
        if by_digest:
            self._alike.append([each for each in by_digest.values() if len(each) > 1])
        if len(self._alike) < _FIRST_STEPS:
            return
        for group in self._alike[0]:
            if running().identity.rank == group[0] and all(group in step for step in self._alike):
                _log.warning(
                    "ranks %s have loaded the same batches in the first %d steps, at %s on rank %d, so they all learn the same "
                    "from them. Give each rank its own part of the data: torch.utils.data.DistributedSampler(dataset, "
                    "num_replicas=hvd.size(), rank=hvd.rank()). (%s compares them.)",
                    ", ".join(map(str, group)),
                    _FIRST_STEPS,
                    batches.line,
                    group[0],
                    DEBUG,
                )


def digest(tensor: torch.Tensor) -> str:
    """The digest of all bytes of a tensor, read from its device."""
    content = tensor.detach().contiguous().reshape(-1)
    if content.layout is torch.strided and not content.is_quantized:
        content = content.resolve_conj().view(torch.uint8)
    return hashlib.blake2b(content.cpu().numpy().tobytes(), digest_size=6).hexdigest()


def debugger(name: str, process_set: ProcessSet, line: str) -> StepDebugger | None:
    """The checks of an optimizer in the running generation; None without ``HOROVOD_DEBUG``."""
    context = running()
    if not context.config.debug or len(process_set.ranks or ()) < 2:
        return None
    loaded.wanted = True
    loaded.take()  # earlier batches belong to no step of this optimizer
    return StepDebugger(name, process_set, line)
