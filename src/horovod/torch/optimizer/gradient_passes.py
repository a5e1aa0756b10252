"""An optimizer's gradients between two steps: which backward passes have touched, and which are reduced.

PyTorch's hooks call it during backward. It sends full buckets, and counts passes whose gradients stay on this rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from operator import attrgetter, is_

import torch

from horovod.comm.reduction import ReduceOp
from horovod.observe.step_clock import BACKWARD, clock
from horovod.torch.optimizer.backward_passes import BackwardPass, current_task, enter
from horovod.torch.optimizer.bucket_sender import BucketSender
from horovod.torch.optimizer.buckets import NO_GRADIENT, ParameterState
from horovod.torch.optimizer.debugging import StepDebugger, debugger
from horovod.torch.optimizer.distributed_part import DistributedPart
from horovod.torch.optimizer.gradient_views import is_only_added
from horovod.torch.optimizer.identity import OptimizerIdentity
from horovod.torch.optimizer.reduction_round import Participant
from horovod.torch.optimizer.settings import OptimizerSettings
from horovod.torch.optimizer.step_check import StepCheck
from horovod.torch.optimizer.step_samples import StepSampler
from horovod.torch.uncompiled import in_compiled_backward, is_traced, refuse_backward, refuse_compiled

_GRADIENT = attrgetter("grad")

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


class GradientPasses(DistributedPart, Participant):
    """The state of one optimizer's gradients between two steps, and what PyTorch's hooks call during backward.

    Sets of slots are integers:
        _touched: backward has added to the gradient since its last reduction.
        _local: of the touched gradients, those whose last pass keeps them on this rank. Only backward may change them.
        _named: some rank has touched the gradient since the last step, so it is reduced. The same on all ranks.
        _reduced: the gradient was reduced since the last ``zero_grad()``.
        _stepped_with: as _named, while a gradient scaler steps.
        _covered: other optimizers reduce the gradient, which were made later over the same parameters.

    Other attributes:
        _settled: whether all ranks have reported all their gradients since the last pass, so that no round is needed.
        _window: the number of counted passes since the last reduction.
        _passes: the passes that are running, or in which backward has raised.
        _task: the graph task of the running pass, see :data:`current_task`; -2: the next hook belongs to a new pass.
        _stays_local: whether the running pass only adds to local gradients.
        _inside: the graph task in which ``step()`` was last called, and the slots whose gradients it has reduced before their
            hooks.
        _steps: the number of steps in this generation, since all ranks last joined.
        _rounds: the number of rounds since the last of these steps.
        _keeps_aside: whether the reduced part of a gradient is kept aside while a newer part is reduced.
        _error: this rank's error. It is raised after the reduction, because other ranks wait for this one.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, settings: OptimizerSettings, identity: OptimizerIdentity
    ) -> None:
        self.name, self.process_set, self.line = "", settings.process_set, settings.line
        self._sender = BucketSender(settings)
        exact = settings.op in (ReduceOp.AVERAGE, ReduceOp.MIN, ReduceOp.MAX) and self._sender.exact
        self._keeps_aside = not exact
        self._touched = self._local = self._named = self._reduced = self._stepped_with = self._covered = 0
        self._settled = False
        self._window = 0
        self._passes: list[weakref.ref[BackwardPass]] = []
        self._task = -2
        self._stays_local = False
        self._inside = -2, 0
        self._steps = self._joins = self._rounds = 0
        self._synchronized = self._scaler_stepped = False
        self._error: BaseException | None = None
        self._check = StepCheck()
        self._sampler = StepSampler()
        self._debugger: StepDebugger | None = None
        super().__init__(optimizer, settings, identity)

    @property
    def is_named(self) -> bool:
        return self.identity.is_named

    @property
    def under_way(self) -> bool:
        """Whether a bucket is being reduced."""
        return bool(self._sender.sent)

    def forget(self) -> None:
        for bucket in (*self.parameters.buckets, *self._sender.sent):
            bucket.reset()
        self._sender.sent.clear()
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
        self.name = self.parameters.name
        self.forget()
        self._steps = self._joins = self._rounds = 0
        self._check.begin()
        self._sampler.begin(self.name)
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
        return sum(bucket.mask for bucket in self.parameters.buckets if bucket.handle is None)

    def coming(self, slot: ParameterState) -> Callable[[torch.Tensor], None] | None:
        return _coming_to(weakref.ref(self), slot) if self._keeps_aside else None

    def gradient_comes(self, slot: ParameterState) -> None:
        """Called before a backward pass adds to a gradient, if reduced parts are kept aside. Moves the reduced part aside."""
        old = slot.parameter.grad
        if old is not None and slot.aside is None and slot.bit & self._reduced & ~self._touched:
            slot.aside, slot.parameter.grad = old, None

    def gradient_is_ready(self, slot: ParameterState, gradient: torch.Tensor | None) -> None:
        """Called when a backward pass has added to a gradient.

        Raises:
            AssertionError: an earlier backward pass has raised, and its gradients are still being reduced.
        """
        task = current_task()
        if task != self._task:
            if task == self._inside[0] and self._is_reduced_inside(slot, gradient):
                return
            self._begin_pass(task, slot, gradient)
        if self._debugger is not None:
            self._debugger.gradient(slot, gradient)
        if self._local:
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
        if not bucket.waiting and bucket.handle is None:
            last = self.ends_passes and not any(
                each.waiting and each.mask & self.parameters.trained for each in self.parameters.buckets
            )
            self._sender.send(bucket, awaited=last)

    def _begin_pass(self, task: int, slot: ParameterState, gradient: torch.Tensor | None) -> None:
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
        self._stays_local = self.is_paused or not self.parameters.communicates()
        if not self._stays_local:
            entered = enter(self, task)
            if entered is not None and all(each() is not entered for each in self._passes):
                self._passes.append(weakref.ref(entered))
            self._stays_local = entered is None or self._window + 1 < self.parameters.passes
        self._synchronized = self._scaler_stepped = False
        for bucket in self.parameters.buckets:
            bucket.waiting = len(bucket.slots)

    def _check_added(self, slot: ParameterState, gradient: torch.Tensor | None) -> None:
        """Check that between two passes only backward has changed a local gradient. The error is raised after the reduction,
        because other ranks wait for this one."""
        if gradient is None or gradient.layout is not torch.strided or gradient.requires_grad:
            return  # backward makes a new tensor when it adds to such a gradient
        if slot.bit & self._local:
            added = gradient._cdata == slot.tensor_address and (
                gradient._version == slot.version + 1
                or is_only_added(slot, gradient, self.parameters.slots.values(), 1)
            )
            thrown_away = (
                gradient._version == 0
            )  # this pass has made the gradient, perhaps at the address of the old one
            if not added and not thrown_away:
                self._error = self._error or AssertionError(CHANGED_LOCALLY.format(name=slot.name))
            self._local &= ~slot.bit
        slot.version = gradient._version

    def note_outside(self, inside: bool) -> int:
        """Note the gradients that the script has set since their reduction, or that it has never had reduced. Called in a step.

        Args:
            inside: whether a backward pass runs. It may have added to gradients whose hooks of this optimizer come only after
                the hook of the script that steps. These count as touched.

        Returns:
            The set of gradients that must be reduced, although no hook has been called for them.
        """
        reduced = [slot.reduced() for slot in self.parameters.slots.values()]
        if not inside and all(map(is_, reduced, map(_GRADIENT, self.parameters.slots))):
            return 0
        outside = replaced = 0
        for slot, known in zip(self.parameters.slots.values(), reduced, strict=True):
            gradient = slot.parameter.grad
            if gradient is None or slot.bit & self._covered:
                continue
            if slot.bit & self._local:
                if inside and (gradient._cdata, gradient._version) != (slot.tensor_address, slot.version):
                    self._check_added(slot, gradient)
                    outside |= slot.bit
            elif slot.bit & self._touched:
                continue
            elif slot.bit & self._named or (self._keeps_aside and slot.bit & self._reduced):
                if self._keeps_aside:
                    replaced |= slot.bit if inside and slot.aside is not None else 0
                elif known is not gradient or (inside and gradient._version != slot.version):
                    replaced |= slot.bit
            elif inside or known is not gradient:
                outside |= slot.bit
        self._touched |= replaced
        return outside | replaced

    def stepped_inside(self, task: int, outside: int) -> None:
        """Note that ``step()`` was called inside a backward pass.

        Args:
            task: the graph task of the pass.
            outside: the gradients that it has reduced, although their hooks may still come.
        """
        self._inside = task, outside

    def _is_reduced_inside(self, slot: ParameterState, gradient: torch.Tensor | None) -> bool:
        """Whether ``step()`` has reduced this gradient in a hook of the script that runs before this optimizer's."""
        task, outside = self._inside
        if not slot.bit & outside:
            return False
        self._inside = task, outside & ~slot.bit
        return gradient is None or (slot.reduced() is gradient and gradient._version == slot.version)

    def pass_ended(self, task: int) -> bool:
        self._passes = self._open_passes()
        if task == self._inside[0] and not self._touched:
            return False  # step() has reduced what the pass has touched
        self._window += 1
        return self._window >= self.parameters.passes


def _coming_to(optimizer: weakref.ref[GradientPasses], slot: ParameterState) -> Callable[[torch.Tensor], None]:
    """The function that is called before the hook of ``slot``."""

    def coming(gradient: torch.Tensor) -> None:
        if is_traced():
            refuse_compiled(slot.name)
        present = optimizer()
        if present is not None:
            present.gradient_comes(slot)

    return coming
