"""Handles gradients during backward passes: sends full buckets, and counts passes whose gradients stay on this rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from horovod.observe.step_clock import BACKWARD, clock
from horovod.torch.optimizer.backward_passes import current_task, enter
from horovod.torch.optimizer.buckets import NO_GRADIENT, Slot
from horovod.torch.optimizer.gradient_hooks import GradientHook
from horovod.torch.optimizer.gradient_state import GradientState
from horovod.torch.optimizer.parameters import heard_by
from horovod.torch.uncompiled import in_compiled_backward, is_traced, refuse_backward, refuse_compiled

AFTER_AN_EXCEPTION = (
    "After an exception inside backward(), call optimizer.synchronize() and then optimizer.zero_grad()."
)
_BACKWARD_AGAIN = (
    f"backward() was called again after it had raised, while gradients are being reduced. {AFTER_AN_EXCEPTION}"
)
CHANGED_LOCALLY = (
    "The gradient of {name!r} was changed before its reduction: this rank's gradients are its own until the last pass of "
    "backward_passes_per_step, and inside optimizer.no_sync(). Change gradients after they are reduced, or call "
    "optimizer.synchronize() before."
)


class GradientPasses(GradientState):
    """The part of an optimizer that PyTorch's hooks call during backward."""

    _task = -2
    """The graph task of the running pass, see :data:`current_task`; -2: the next hook belongs to a new pass."""
    _stays_local = False
    """Whether the running pass only adds to local gradients."""

    def hook(self, slot: Slot) -> GradientHook:
        if not self._keeps_aside:
            return super().hook(slot)
        return GradientHook(slot.parameter, heard_by(weakref.ref(self), slot), _coming_to(weakref.ref(self), slot))

    def gradient_comes(self, slot: Slot) -> None:
        """Called before a backward pass adds to a gradient, if reduced parts are kept aside. Moves the reduced part aside."""
        old = slot.parameter.grad
        if old is not None and slot.aside is None and slot.bit & self._reduced & ~self._touched:
            slot.aside, slot.parameter.grad = old, None

    def gradient_is_ready(self, slot: Slot, gradient: torch.Tensor | None) -> None:
        """Called when a backward pass has added to a gradient.

        Raises:
            AssertionError: an earlier backward pass has raised, and its gradients are still being reduced.
        """
        task = current_task()
        if task != self._task:
            self._begin_pass(task, slot, gradient)
        if self._debugger is not None:
            self._debugger.gradient(slot, gradient)
        if slot.bit & self._local:
            self._check_added(slot, gradient)
        self._touched |= slot.bit
        if self._stays_local:
            self._local |= slot.bit
            if gradient is not None:
                slot.version, slot.tensor_address = gradient._version, gradient._cdata
            return
        bucket = slot.bucket
        if bucket is None:
            return  # this rank does not reduce in this generation
        bucket.waiting -= 1
        if not bucket.waiting and bucket.open:
            last = self.ends_passes and not any(each.waiting and each.mask & self.trained for each in self.buckets)
            self._sender.send(bucket, awaited=last)

    def _begin_pass(self, task: int, slot: Slot, gradient: torch.Tensor | None) -> None:
        """Handle the first hook of a pass, or the first hook after a nested pass."""
        if in_compiled_backward():
            refuse_backward(slot.name)
        if any(each() is None for each in self._passes):
            if self.under_way:
                slot.version = NO_GRADIENT if gradient is None else gradient._version
                raise AssertionError(_BACKWARD_AGAIN)
            self._passes.clear()
        self._task = task
        clock.enter(BACKWARD)
        self.prepare()
        self._stays_local = self.is_paused or not self.communicates()
        if not self._stays_local:
            entered = enter(self, task)
            if entered is not None and all(each() is not entered for each in self._passes):
                self._passes.append(weakref.ref(entered))
            self._stays_local = entered is None or self._window + 1 < self.passes
        self._synchronized = self._scaler_stepped = False
        for bucket in self.buckets:
            bucket.waiting = len(bucket.slots)

    def _check_added(self, slot: Slot, gradient: torch.Tensor | None) -> None:
        """Check that between two passes only backward has changed a local gradient. The error is raised after the reduction,
        because other ranks wait for this one."""
        if gradient is None or gradient.layout is not torch.strided or gradient.requires_grad:
            return  # backward makes a new tensor when it adds to such a gradient
        added = gradient._cdata == slot.tensor_address and gradient._version == slot.version + 1
        thrown_away = gradient._version == 0  # this pass has made the gradient, perhaps at the address of the old one
        if not added and not thrown_away:
            self._error = self._error or AssertionError(CHANGED_LOCALLY.format(name=slot.name))
        self._local &= ~slot.bit

    def pass_ended(self) -> bool:
        self._passes = self._open_passes()
        self._window += 1
        return self._window >= self.passes


def _coming_to(optimizer: weakref.ref[GradientPasses], slot: Slot) -> Callable[[torch.Tensor], None]:
    """The function that is called before the hook of ``slot``."""

    def coming(gradient: torch.Tensor) -> None:
        if is_traced():
            refuse_compiled(slot.name)
        present = optimizer()
        if present is not None:
            present.gradient_comes(slot)

    return coming
