"""Counts backward passes for each parameter of an optimizer, and decides when a bucket of gradients is sent.

A step goes through the phases of :class:`Phase`. Every rank sends every bucket exactly once a step: inside backward, when the
last gradient of the bucket is ready, or else in ``step()``. The backward pass that sends the last bucket waits for all buckets
before it ends, so the gradients are reduced when ``backward()`` returns.

Waiting there must not cause a deadlock:

1. A rank that waits sends nothing more until ``step()``.
2. Another rank may have filled a bucket of a second optimizer in the same pass, and wait for it.
3. So a rank does not wait while any optimizer of its process has begun a step, or is new, and has buckets that backward can
   still fill. Then ``step()`` or ``synchronize()`` waits.

If backward adds to gradients that ``step()`` has used already, the sum stays on this rank. Usually it comes from another
model's loss (in a GAN, the generator's loss flows through the discriminator), and ``zero_grad()`` discards it. A step begins
with ``zero_grad()``, or with the first gradient that is not added to an old one.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from itertools import count
from typing import Any

import torch

from horovod.common.basics import is_initialized
from horovod.core.lifecycle.context import running
from horovod.core.requests.handle import all_of
from horovod.torch.optimizer.buckets import Bucket, Slot
from horovod.torch.optimizer.identity import Identity
from horovod.torch.optimizer.parameters import OptimizerParameters
from horovod.torch.optimizer.settings import Settings, check_passes

_AFTER_AN_EXCEPTION = (
    "After an exception inside backward(), call optimizer.synchronize(), or with op=hvd.Adasum optimizer.step(), "
    "and then optimizer.zero_grad()."
)
_TOO_MANY_PASSES = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally, or run all passes but the last inside "
    f"optimizer.no_sync(). {_AFTER_AN_EXCEPTION} The parameter is {{name!r}}."
)
_ZERO_GRAD_TOO_EARLY = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
    f"This would clear gradients that are being reduced. {_AFTER_AN_EXCEPTION}"
)
_INSIDE_NO_SYNC = "inside optimizer.no_sync() gradients are not reduced; leave the block before {what}"

_optimizers: weakref.WeakValueDictionary[int, Readiness] = weakref.WeakValueDictionary()
"""The optimizers of this process, in the order in which they were made."""
_count = count()


class Phase(Enum):
    """Where an optimizer is between two calls of ``step()``."""

    NEW = "the optimizer has made no step; the first gradient begins one"
    STEPPED = "the last step has used the gradients"
    FILLING = "a step has begun; backward fills buckets, and full buckets are sent"
    REDUCED = "all gradients are reduced"
    SYNCHRONIZED = "all gradients are reduced, and the script has called synchronize()"


_FILLING = Phase.FILLING  # looking up a member of an Enum would double the time of a hook


class Readiness(OptimizerParameters):
    """The distributed part of one optimizer: its parameters, and the progress of backward for each.

    Attributes:
        phase: the phase of the present step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, settings: Settings, identity: Identity) -> None:
        self.phase = Phase.NEW
        self._paused = False
        self._original: weakref.ref[torch.optim.Optimizer] | None = None
        super().__init__(optimizer, settings, identity)
        _optimizers[next(_count)] = self

    @abstractmethod
    def send(self, bucket: Bucket, awaited: bool = False) -> None:
        """Start to reduce a bucket. Sets its ``handle`` and ``sent``. A missing gradient counts as zeros.

        Args:
            awaited: this thread waits for the reduction at the end of backward, which is close. A quick reduction begins then.
        """

    @abstractmethod
    def end_backward(self) -> None:
        """Called at the end of a backward pass, unless an optimizer of this process :attr:`holds_back` a bucket."""

    @abstractmethod
    def abandon(self) -> None:
        """Give up the present step, whether or not its reductions succeed."""

    @abstractmethod
    def before_scaler_steps(self) -> None:
        """Called before a gradient scaler steps. It has unscaled the gradients, or does so next.

        Raises:
            AssertionError: the gradients are not reduced.
        """

    @property
    def reduced(self) -> bool:
        """Whether the gradients are reduced, and no step has used them yet."""
        return self.phase in (Phase.REDUCED, Phase.SYNCHRONIZED)

    @property
    def under_way(self) -> bool:
        """Whether a bucket is being reduced."""
        return any(bucket.handle is not None for bucket in self.buckets)

    def derived_from(self, original: torch.optim.Optimizer) -> None:
        """Remember the optimizer that the user wrapped. A learning-rate scheduler may refer to it."""
        self._original = weakref.ref(original)

    def tell_schedulers(self) -> None:
        """Let a learning-rate scheduler of the original optimizer know that steps are made."""
        original: Any = self._original() if self._original is not None else None
        if original is not None:
            original._opt_called = True  # PyTorch's schedulers check this,
            original._step_count = 1  # or this before 2.4

    def add_parameters(self) -> None:
        """Adopt parameters that were added to the optimizer, perhaps in the middle of a step."""
        self.adopt()
        if self.phase is Phase.FILLING and is_initialized():
            self.prepare()

    def zero_grad(self) -> None:
        """Begin a step: the script discards the gradients.

        Raises:
            AssertionError: some gradients are complete, and may already be sent.
        """
        if is_initialized():
            self.prepare()
        if self.phase is Phase.FILLING and any(bucket.waiting != len(bucket.slots) for bucket in self.buckets):
            raise AssertionError(_ZERO_GRAD_TOO_EARLY)
        self.begin()
        for other in _optimizers.values():
            if other.phase is Phase.NEW:  # the script calls zero_grad(), but has not called it for this optimizer
                other.phase = Phase.STEPPED

    def begin(self) -> None:
        """Begin a step without gradients."""
        if self.phase is Phase.FILLING:
            self._reset()  # the gradients of passes so far are discarded
        self.phase = Phase.FILLING
        for bucket in self.buckets:
            bucket.reduced = False
        for slot in self.slots.values():
            slot.version = None
            hook = slot.hook
            if hook is not None and hook.implementation != slot.parameter._cdata:
                hook.restore()

    def gradient_is_ready(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Called when a backward pass has added to a gradient.

        Raises:
            AssertionError: the gradient had already got all its passes.
        """
        before, slot.version = slot.version, gradient._version
        if self.phase is not _FILLING and not self._begins_with(slot, before):
            return
        if slot.bucket is None:
            self.prepare()
        bucket = slot.bucket
        if bucket is None:
            return  # this rank does not reduce in this generation
        if self._paused:
            if bucket.handle is not None:
                raise AssertionError(_TOO_MANY_PASSES.format(name=slot.name))
            return
        if not slot.passes:
            raise AssertionError(_TOO_MANY_PASSES.format(name=slot.name))
        slot.passes -= 1
        if slot.passes:
            return
        bucket.waiting -= 1
        if bucket.waiting or running().generation != self.generation:
            return
        last = not any(each.open for each in self.buckets if each is not bucket)
        # Not awaited where another optimizer holds the wait back: its part of backward comes first.
        self.send(bucket, last and not any(each.holds_back for each in _optimizers.values() if each is not self))
        if last:
            torch.autograd.Variable._execution_engine.queue_callback(_end_of_backward)

    def _begins_with(self, slot: Slot, before: int | None) -> bool:
        """Whether a step begins with this gradient, that is, whether backward has not added it to an old one.

        Raises:
            AssertionError: backward has added it to a reduced gradient that no step has used yet.
        """
        if before is None:  # there was no gradient before; the other parameters decide
            added = not any(each.version is not None and each.parameter.grad is None for each in self.slots.values())
        else:
            added = slot.version == before + 1
        if self.phase is Phase.STEPPED:
            if added or torch.is_grad_enabled():  # with create_graph=True a sum is a new tensor
                return False
        elif added and self.phase is not Phase.NEW:
            raise AssertionError(_TOO_MANY_PASSES.format(name=slot.name))
        version = slot.version
        self.prepare()
        self.begin()
        slot.version = version
        return True

    @property
    def holds_back(self) -> bool:
        """Whether backward may still fill a bucket of a step that has begun here, or that may have begun on another rank."""
        waiting: Iterable[Slot] = ()
        if self.phase is Phase.NEW:
            waiting = self.slots.values()
        elif self.phase is Phase.FILLING and self.generation == running().generation:
            waiting = (slot for bucket in self.buckets if bucket.open for slot in bucket.slots)
        return any(
            slot.parameter.requires_grad and slot.hook is not None and slot.hook.is_registered() for slot in waiting
        )

    def send_all(self) -> BaseException | None:
        """Send all buckets that are not sent. Returns the first error."""
        error: BaseException | None = None
        self.prepare()
        for bucket in self.buckets:
            if bucket.open:
                try:
                    self.send(bucket)
                except BaseException as failure:
                    error = error or failure
        return error

    def end_reduction(self) -> None:
        """Called when all buckets are reduced."""
        self._reset()
        self.phase = Phase.REDUCED
        for bucket in self.buckets:
            bucket.reduced = True

    def end_step(self) -> None:
        """Called when the wrapped optimizer has used the gradients."""
        if self.phase is Phase.FILLING:
            self._reset()
        self.phase = Phase.STEPPED
        for bucket in self.buckets:
            bucket.reduced = False
        for slot in self.slots.values():
            gradient = slot.parameter.grad
            slot.version = None if gradient is None else gradient._version

    def forget(self) -> None:
        """Return to the first phase: no reduction is running, and no gradient is known."""
        self._reset()
        self.begin()
        self.phase = Phase.NEW

    def _reset(self) -> None:
        for bucket in self.buckets:
            bucket.reset(self.passes)

    def rewind(self) -> None:
        """Restart the count of passes for all buckets that are not sent."""
        for bucket in self.buckets:
            if bucket.handle is None:
                bucket.reset(self.passes)

    def set_passes(self, passes: int) -> None:
        self.passes = check_passes(passes)
        self.rewind()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block in which backward passes are not counted."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def check_not_paused(self, what: str) -> None:
        """Raises AssertionError inside :meth:`paused`."""
        if self._paused:
            raise AssertionError(_INSIDE_NO_SYNC.format(what=what))


def _end_of_backward() -> None:
    optimizers = list(_optimizers.values())
    if not any(optimizer.holds_back for optimizer in optimizers):
        all_of(optimizer.end_backward for optimizer in optimizers)
