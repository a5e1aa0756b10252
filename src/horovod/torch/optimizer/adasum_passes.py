"""Counts backward passes for each parameter of an optimizer with Adasum, and decides when a bucket is sent.

Local steps are made inside backward, so the number of passes must be exact: a bucket is sent when all its gradients have had
``backward_passes_per_step`` passes, and in ``step()`` at the latest. Every rank sends every bucket exactly once per step.

If backward adds to gradients that ``step()`` has used already, the sum stays on this rank. Usually it comes from another
model's loss (in a GAN, the generator's loss flows through the discriminator), and ``zero_grad()`` discards it. A step begins
with ``zero_grad()``, or with the first gradient that is not added to an old one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from enum import Enum
from itertools import count

import torch

from horovod.core.lifecycle.context import running
from horovod.torch.optimizer.adasum_sender import AdasumSender
from horovod.torch.optimizer.buckets import NO_GRADIENT, Bucket, ParameterState
from horovod.torch.optimizer.counted_passes import ZERO_GRAD_TOO_EARLY, CountedPasses
from horovod.torch.optimizer.parameters import OptimizerParameters

_AFTER_AN_EXCEPTION = "After an exception inside backward(), call optimizer.step() and then optimizer.zero_grad()."
_TOO_MANY_PASSES = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally, or run all passes but the last inside "
    f"optimizer.no_sync(). {_AFTER_AN_EXCEPTION} The parameter is {{name!r}}."
)
_ZERO_GRAD_TOO_EARLY = f"{ZERO_GRAD_TOO_EARLY} {_AFTER_AN_EXCEPTION}"

_adasums: weakref.WeakValueDictionary[int, AdasumPasses] = weakref.WeakValueDictionary()
_count = count()


class Phase(Enum):
    """The state of an optimizer between two calls of ``step()``."""

    NEW = "the optimizer has made no step; the first gradient begins one"
    STEPPED = "the last step has used the gradients"
    FILLING = "a step has begun; backward fills buckets, and full buckets are sent"


class AdasumPasses(CountedPasses):
    """The backward passes of an optimizer with Adasum.

    Args:
        parameters: of the optimizer.
        sender: makes the local step of a bucket, and sends the changes.

    Attributes:
        phase: the phase of the present step.
    """

    def __init__(self, parameters: OptimizerParameters, sender: AdasumSender) -> None:
        super().__init__(parameters.settings.passes)
        self._parameters = parameters
        self._sender = sender
        self.phase = Phase.NEW
        _adasums[next(_count)] = self

    def discard(self) -> None:
        if self.phase is Phase.FILLING and any(
            bucket.waiting != len(bucket.slots) for bucket in self._parameters.buckets
        ):
            raise AssertionError(_ZERO_GRAD_TOO_EARLY)
        self.begin()
        for other in _adasums.values():
            if other.phase is Phase.NEW:  # the script calls zero_grad(), but has not called it for this optimizer
                other.phase = Phase.STEPPED

    def begin(self) -> None:
        """Begin a step without gradients."""
        if self.phase is Phase.FILLING:
            self.reset()  # the gradients of passes so far are discarded
        self.phase = Phase.FILLING
        for slot in self._parameters.slots.values():
            slot.version = NO_GRADIENT

    def new_generation(self) -> None:
        for slot in self._parameters.slots.values():
            slot.passes = 0

    def renumbered(self, moved: Callable[[int], int]) -> None:
        for slot in self._parameters.slots.values():
            if slot.bucket is None:  # a new bucket waits for all passes of a step
                slot.passes = 0

    def gradient_is_ready(self, slot: ParameterState, gradient: torch.Tensor | None) -> None:
        """Called when a backward pass has added to a gradient.

        Raises:
            AssertionError: the gradient has had all its passes before.
        """
        if gradient is None:
            return
        before, slot.version = slot.version, gradient._version
        if self.phase is not Phase.FILLING and not self._begins_with(slot, before):
            return
        if slot.bucket is None:
            self._parameters.prepare()
        bucket = slot.bucket
        if bucket is None:
            return  # this rank does not reduce in this generation
        if bucket.handle is not None or (slot.passes >= self.per_step and not self.is_paused):
            raise AssertionError(_TOO_MANY_PASSES.format(name=slot.name))
        if self.is_paused:
            return
        slot.passes += 1
        if slot.passes < self.per_step:
            return
        bucket.waiting -= 1
        if not bucket.waiting and running().generation == self._parameters.generation:
            self._sender.send(bucket)

    def _begins_with(self, slot: ParameterState, before: int) -> bool:
        """Begin a step if backward has not added this gradient to an old one. Returns whether a step has begun."""
        if before == NO_GRADIENT:  # the other parameters show whether gradients were discarded
            added = not any(
                each.version != NO_GRADIENT and each.parameter.grad is None for each in self._parameters.slots.values()
            )
        else:
            added = slot.version == before + 1
        if self.phase is Phase.STEPPED and (added or torch.is_grad_enabled()):
            return False  # with create_graph=True a sum is a new tensor
        version = slot.version
        self._parameters.prepare()
        self.begin()
        slot.version = version
        return True

    def send_all(self) -> BaseException | None:
        """Send all buckets that are not sent. Returns the first error."""
        error: BaseException | None = None
        self._parameters.follow()
        self._parameters.prepare()
        for bucket in self._parameters.buckets:
            if bucket.handle is None:
                try:
                    self._sender.send(bucket)
                except BaseException as failure:
                    error = error or failure
        return error

    def stepped(self) -> None:
        """Note that the combined changes have been applied."""
        self.reset()
        self._parameters.count.made += 1
        self.phase = Phase.STEPPED
        for slot in self._parameters.slots.values():
            gradient = slot.parameter.grad
            slot.version = NO_GRADIENT if gradient is None else gradient._version

    def forget(self) -> None:
        self.reset()
        self.begin()
        self.phase = Phase.NEW

    def reset(self) -> None:
        """Restart the count of passes of all buckets."""
        for bucket in self._parameters.buckets:
            self._reset(bucket)

    def restart(self) -> None:
        for bucket in self._parameters.buckets:
            if bucket.handle is None:
                self._reset(bucket)

    @staticmethod
    def _reset(bucket: Bucket) -> None:
        bucket.reset()
        for slot in bucket.slots:
            slot.passes = 0
