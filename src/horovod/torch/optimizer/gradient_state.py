"""The state of an optimizer's gradients between two steps, and how a step, a failure or a new generation changes it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import torch

from horovod.comm.reduction import ReduceOp
from horovod.core.lifecycle.process_set import ProcessSet
from horovod.torch.optimizer.backward_passes import BackwardPass, PassListener
from horovod.torch.optimizer.bucket_sender import BucketSender
from horovod.torch.optimizer.buckets import Bucket, ParameterState
from horovod.torch.optimizer.debugging import StepDebugger, debugger
from horovod.torch.optimizer.distributed_part import DistributedPart
from horovod.torch.optimizer.identity import OptimizerIdentity
from horovod.torch.optimizer.settings import OptimizerSettings
from horovod.torch.optimizer.step_check import StepCheck
from horovod.torch.optimizer.step_samples import StepSampler


class GradientState(DistributedPart, PassListener):
    """The state of one optimizer's gradients.

    Sets of slots are integers:
        _touched: backward has added to the gradient since its last reduction.
        _local: of the touched gradients, those whose last pass keeps them on this rank. Only backward may change them.
        _named: some rank has touched the gradient since the last step, so it is reduced. The same on all ranks.
        _reduced: the gradient was reduced since the last ``zero_grad()``.
        _stepped_with: as _named, while a gradient scaler steps.

    Other attributes:
        _settled: whether all ranks have reported all their gradients since the last pass, so that no round is needed.
        _window: the number of counted passes since the last reduction.
        _passes: the passes that are running, or in which backward has raised.
        _steps: the number of steps in this generation, since all ranks last joined.
        _rounds: the number of rounds since the last of these steps.
        _keeps_aside: whether the reduced part of a gradient is kept aside while a newer part is reduced.
        _error: this rank's error. It is raised after the reduction, because other ranks wait for this one.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, settings: OptimizerSettings, identity: OptimizerIdentity
    ) -> None:
        self._sender = BucketSender(settings)
        exact = settings.op in (ReduceOp.AVERAGE, ReduceOp.MIN, ReduceOp.MAX) and self._sender.exact
        self._keeps_aside = not exact
        self._touched = self._local = self._named = self._reduced = 0
        self._settled = False
        self._window = 0
        self._passes: list[weakref.ref[BackwardPass]] = []
        self._steps = self._joins = self._rounds = 0
        self._synchronized = self._scaler_stepped = False
        self._error: BaseException | None = None
        self._check = StepCheck()
        self._sampler = StepSampler()
        self._stepped_with = 0
        self._debugger: StepDebugger | None = None
        super().__init__(optimizer, settings, identity)

    @property
    def name(self) -> str:
        return self.parameters.name

    @property
    def process_set(self) -> ProcessSet:
        return self.settings.process_set

    @property
    def is_named(self) -> bool:
        return self.identity.is_named

    @property
    def line(self) -> str:
        return self.settings.line

    @property
    def under_way(self) -> bool:
        """Whether a bucket is being reduced."""
        return any(not each.open for each in self._sendable())

    def forget(self) -> None:
        for bucket in self._sendable():
            bucket.reset()
        for slot in self.parameters.slots.values():
            if slot.aside is not None:
                slot.parameter.grad, slot.aside = slot.aside, None
        self.discard()

    def discard(self) -> None:
        """Reset the state because the script discards the gradients. Discards those that are kept aside, too."""
        self._rest()
        self._reduced = 0
        self._passes.clear()
        self._error = None
        for slot in self.parameters.slots.values() if self._keeps_aside else ():
            slot.aside = None

    def is_elsewhere(self) -> bool:
        return any(not found.is_here for each in self._passes if (found := each()) is not None and not found.ended)

    def _open_passes(self) -> list[weakref.ref[BackwardPass]]:
        return [each for each in self._passes if (found := each()) is not None and not found.ended]

    def _rest(self) -> None:
        """Reset the state between two steps: no gradient is known to be reduced for the next step."""
        self._touched = self._local = self._named = 0
        self._settled = self._synchronized = self._scaler_stepped = False
        self._window = 0

    def new_generation(self) -> None:
        self.forget()
        self._steps = self._joins = self._rounds = 0
        self._check.begin()
        self._sampler.begin()
        self._debugger = debugger(self.name, self.process_set, self.line)

    def renumbered(self, moved: Callable[[int], int]) -> None:
        self._touched, self._local = moved(self._touched), moved(self._local)
        self._named, self._reduced = moved(self._named), moved(self._reduced)
        self._sampler.renumbered([*self.parameters.slots.values()])

    def _all(self) -> int:
        return (1 << len(self.parameters.slots)) - 1

    def _in(self, mask: int) -> Iterator[ParameterState]:
        return (slot for slot in self.parameters.slots.values() if slot.bit & mask) if mask else iter(())

    def _unsent(self) -> int:
        return sum(bucket.mask for bucket in self.parameters.buckets if bucket.open)

    def _sendable(self) -> Iterator[Bucket]:
        for bucket in self.parameters.buckets:
            yield bucket
            yield from bucket.parts()
