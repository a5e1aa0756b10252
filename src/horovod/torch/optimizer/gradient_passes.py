"""An optimizer's gradients between two steps: which backward passes have touched, and which are reduced.

PyTorch's hooks call it during backward. It sends full buckets, and counts passes whose gradients stay on this rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from operator import attrgetter, is_, methodcaller

import torch

from horovod.comm.reduction import ReduceOp
from horovod.observe.step_clock import BACKWARD, clock
from horovod.torch.optimizer.backward_passes import BackwardPass, PassListener, call_at_end, current_task, enter
from horovod.torch.optimizer.bucket_sender import BucketSender
from horovod.torch.optimizer.buckets import NO_GRADIENT, ParameterState
from horovod.torch.optimizer.counted_passes import ZERO_GRAD_TOO_EARLY, CountedPasses
from horovod.torch.optimizer.debugging import StepDebugger, debugger
from horovod.torch.optimizer.gradient_views import is_as_left
from horovod.torch.optimizer.parameters import OptimizerParameters
from horovod.torch.optimizer.reduction_round import Participant
from horovod.torch.optimizer.script_gradients import found_outside
from horovod.torch.uncompiled import in_compiled_backward, refuse_backward, uncompiled

_GRADIENT = attrgetter("grad")
_REDUCED = methodcaller("reduced")
_PASS = weakref.ref.__call__
"""The pass that a reference refers to; None: it was freed before it has ended, because backward has raised."""

_AFTER_AN_EXCEPTION = (
    "After an exception inside backward(), call optimizer.synchronize() and then optimizer.zero_grad()."
)
_BACKWARD_AGAIN = (
    f"backward() was called again after it had raised, while gradients are being reduced. {_AFTER_AN_EXCEPTION}"
)
_ZERO_GRAD_TOO_EARLY = f"{ZERO_GRAD_TOO_EARLY} {_AFTER_AN_EXCEPTION}"
CHANGED_LOCALLY = (
    "The gradient of {name!r} was changed before its reduction: this rank's gradients are its own until the last pass of "
    "backward_passes_per_step, and inside optimizer.no_sync(). Change gradients after they are reduced, or call "
    "optimizer.synchronize() before."
)


class GradientPasses(CountedPasses, PassListener):
    """The state of one optimizer's gradients between two steps, and what PyTorch's hooks call during backward.

    Args:
        parameters: of the optimizer.
        sender: sends its buckets.

    Attributes:
        touched: backward has added to the gradient since its last reduction. This and the next five are sets of slots.
        local: of the touched gradients, those whose last pass keeps them on this rank. Only backward may change them.
        named: some rank has touched the gradient since the last step, so it is reduced. The same on all ranks.
        reduced: the gradient was reduced since the last ``zero_grad()``.
        stepped_with: as ``named``, while a gradient scaler steps.
        covered: other optimizers reduce the gradient, which were made later over the same parameters.
        keeps_aside: whether the reduced part of a gradient is kept aside while a newer part is reduced.
        is_synchronized: whether the script has called ``synchronize()`` since the last pass.
        scaler_steps: whether a gradient scaler steps, or has skipped the step, since the last pass.
        error: this rank's error. It is raised after the reduction, because other ranks wait for this one.

    Other attributes:
        _settled: whether all ranks have reported all their gradients since the last pass, so that no round is needed.
        _window: the number of counted passes since the last reduction.
        _passes: the passes that are running, or in which backward has raised.
        _task: the graph task of the running pass, see :data:`current_task`; -2: the next hook belongs to a new pass.
        _stays_local: whether the running pass only adds to local gradients.
        _keeps_local: whether any pass has. From then on :meth:`gradient_comes` is called for every parameter.
        _filling: the trained gradients in buckets of which the running pass has not touched all.
        _aside_task: the graph task in which reduced gradients were last put aside.
        _ends_passes: whether the optimizer was the last to enter the latest pass, as it probably will be in the next pass.
        _inside: the graph task in which ``step()`` was last called, and the slots whose gradients it has reduced before their
            hooks.
    """

    def __init__(self, parameters: OptimizerParameters, sender: BucketSender) -> None:
        settings = parameters.settings
        super().__init__(settings.passes)
        self._parameters = parameters
        self._sender = sender
        exact = settings.op in (ReduceOp.AVERAGE, ReduceOp.MIN, ReduceOp.MAX) and sender.exact
        self.keeps_aside = not exact
        self.touched = self.local = self.named = self.reduced = self.stepped_with = self.covered = 0
        self.is_synchronized = self.scaler_steps = False
        self.error: BaseException | None = None
        self._settled = False
        self._window = 0
        self._passes: list[weakref.ref[BackwardPass]] = []
        self._task = -2
        self._stays_local = self._keeps_local = self._ends_passes = False
        self._filling = 0
        self._aside_task = -2
        self._inside = -2, 0
        self._participant: weakref.ref[Participant] | None = None
        self._debugger: StepDebugger | None = None

    def reduced_by(self, participant: Participant) -> None:
        """Say which participant of rounds reduces these gradients. It has these passes, so they do not keep it."""
        self._participant = weakref.ref(participant)

    @property
    def under_way(self) -> bool:
        """Whether a bucket is being reduced."""
        return bool(self._sender.sent)

    @property
    def have_begun(self) -> bool:
        """Whether a pass runs, or has raised, or a bucket is being reduced."""
        return bool(self._passes or self._sender.sent)

    def is_elsewhere(self) -> bool:
        """Whether another thread runs one of the passes."""
        return any(not found.is_here for each in self._passes if (found := each()) is not None and not found.ended)

    def is_due(self) -> bool:
        """Whether a round is needed before the step. The same on all ranks whose backward passes were the same."""
        if self.touched or self._sender.sent or None in map(_PASS, self._passes):
            return True
        wanted = self._parameters.trained & ~self.covered
        return not self._settled and self.named & wanted != wanted

    def fail(self, error: BaseException) -> None:
        """Note an error of this rank, unless there is one."""
        self.error = self.error or error

    def cover(self, covered: int) -> None:
        """Note which gradients other optimizers reduce."""
        self.covered = covered

    def forget(self) -> None:
        """Abandon the present step: no reduction is running."""
        for bucket in self._parameters.buckets:
            bucket.reset()
        self._sender.reset()
        for slot in self._parameters.slots.values():
            slot.put_back()
        self.drop()

    def discard(self) -> None:
        if self._sender.sent or (self._passes and self.touched and not self._stays_local):
            raise AssertionError(_ZERO_GRAD_TOO_EARLY)
        self.drop()

    def drop(self) -> None:
        """Reset the state, because the gradients are discarded. Discards those that are kept aside, too."""
        self.rest()
        self.reduced = 0
        self._passes.clear()
        self.error = None
        if self.keeps_aside:
            for slot in self._parameters.slots.values():
                slot.drop_aside()

    def rest(self) -> None:
        """Reset the state between two steps: no gradient is known to be reduced for the next step."""
        self.touched = self.local = self.named = 0
        self._settled = self.is_synchronized = self.scaler_steps = False
        self._window = 0

    def restart(self) -> None:
        self._window = 0

    def stepped(self) -> None:
        """Note that the wrapped optimizer has used the gradients.

        Raises:
            MismatchError: with ``HOROVOD_DEBUG``, values differ that must be equal, and ``HOROVOD_CHECK=error``.
        """
        self.rest()
        slots = self._parameters.slots.values()
        if self.keeps_aside:
            for slot in slots:
                slot.note_left(slot.parameter.grad)
        if self._debugger is not None:
            self._debugger.after_step(slots)

    def unsettle(self) -> None:
        """Note that no gradient is known to be reduced, because the closure of a step begins."""
        self.named, self._settled = 0, False

    def note_scaler(self) -> None:
        """Note that a gradient scaler steps. It may skip the step, which counts as one."""
        self.stepped_with = self.named
        self.unsettle()
        self.scaler_steps = True

    def note_synchronized(self) -> None:
        self.is_synchronized = True

    def note_reported(self, touched: int) -> None:
        """Note the set of gradients that this rank has reported to the others. The next hook belongs to a new pass."""
        self.touched = touched
        self._task = -2

    def note_reduced(self, touched: int, final: bool) -> None:
        """Note that a round has reduced the gradients that any rank has touched.

        Args:
            touched: their set.
            final: whether all ranks have reported all gradients.
        """
        self.named |= touched
        self.reduced |= touched
        self.touched = self.local = 0
        self._window = 0
        self._settled = final
        self._drop_ended()

    def _drop_ended(self) -> None:
        """Keep only passes that are running. Those in which backward has raised are closed now, too."""
        running = []
        for each in self._passes:
            found = each()
            if found is not None and not found.ended:
                running.append(each)
        self._passes = running

    def new_generation(self) -> None:
        self.forget()
        settings = self._parameters.settings
        self._debugger = debugger(self._parameters.name, settings.process_set, settings.line)

    def renumbered(self, moved: Callable[[int], int]) -> None:
        self.touched, self.local = moved(self.touched), moved(self.local)
        self.named, self.reduced = moved(self.named), moved(self.reduced)
        self._filling = moved(self._filling)

    def coming(self, slot: ParameterState) -> Callable[[torch.Tensor], None] | None:
        return _coming_to(weakref.ref(self), slot) if self.keeps_aside or self._keeps_local else None

    def gradient_comes(self, slot: ParameterState) -> None:
        """Called before a backward pass adds to a gradient, if reduced parts are kept aside, or some gradients are local."""
        if slot.bit & self.local and slot.parameter.grad is None:
            self.local &= ~slot.bit  # the script has discarded it, so backward makes a new one
            self.touched &= ~slot.bit
        elif self.keeps_aside and slot.aside is None and slot.bit & self.reduced & ~self.touched:
            task = current_task()
            if task != self._aside_task:
                self._aside_task = task
                call_at_end(self._put_back_unadded)
            slot.put_aside(None)

    def _put_back_unadded(self) -> None:
        """Put back what was put aside for new parts that were not added: ``torch.autograd.grad`` has returned them."""
        for slot in self._parameters.slots.values():
            if slot.parameter.grad is None and not slot.bit & self.touched:
                slot.put_back()

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
        if self.local:
            self.check_added(slot, gradient)
        self.touched |= slot.bit
        if self._stays_local:
            self.local |= slot.bit
            if gradient is not None:
                slot.version = gradient._version
                slot.note_left(gradient)
            return
        bucket = slot.bucket
        if bucket is None:
            return  # this rank does not reduce in this generation
        bucket.waiting -= 1
        if not bucket.waiting:
            self._filling &= ~bucket.mask
            if bucket.handle is None:
                self._sender.send(bucket, awaited=self._ends_passes and not self._filling)

    def _begin_pass(self, task: int, slot: ParameterState, gradient: torch.Tensor | None) -> None:
        """Handle the first hook of a pass, or the first hook after a nested pass."""
        if in_compiled_backward():
            refuse_backward(slot.name)
        if None in map(_PASS, self._passes):
            if self._sender.sent:
                slot.version = NO_GRADIENT if gradient is None else gradient._version
                raise AssertionError(_BACKWARD_AGAIN)
            self._passes.clear()
        self._task = task
        clock.enter(BACKWARD)
        self._parameters.prepare()
        self._stays_local = self.is_paused or not self._parameters.reduces
        if not self._stays_local:
            participant = self._participant() if self._participant is not None else None
            assert participant is not None, "an optimizer's part holds both"
            entered = enter(self, participant, task)
            if entered is not None:
                reference = weakref.ref(entered)
                if reference not in self._passes:
                    self._passes.append(reference)
            self._stays_local = entered is None or self._window + 1 < self.per_step
        if self._stays_local and not self._keeps_local:
            self._keeps_local = True
            self._parameters.listen()
        self.is_synchronized = self.scaler_steps = False
        self._filling = self._parameters.trained
        for bucket in self._parameters.buckets:
            bucket.waiting = len(bucket.slots)

    def check_added(self, slot: ParameterState, gradient: torch.Tensor | None) -> None:
        """Check that between two passes only backward has changed a local gradient. The error is raised after the reduction,
        because other ranks wait for this one."""
        if gradient is None or gradient.layout is not torch.strided or gradient.requires_grad:
            return  # backward makes a new tensor when it adds to such a gradient
        if slot.bit & self.local:
            if not is_as_left(slot, gradient, self._parameters.slots.values(), additions=1):
                self.fail(AssertionError(CHANGED_LOCALLY.format(name=slot.name)))
            self.local &= ~slot.bit
        slot.version = gradient._version

    def note_outside(self, inside: bool) -> int:
        """Note the gradients that the script has set since their reduction, or that it has never had reduced. Called in a step.

        Args:
            inside: whether a backward pass runs. It may have added to gradients whose hooks of this optimizer come only after
                the hook of the script that steps. These count as touched.

        Returns:
            The set of gradients that must be reduced, although no hook has been called for them.
        """
        slots = self._parameters.slots
        reduced = [*map(_REDUCED, slots.values())]
        if not inside and all(map(is_, reduced, map(_GRADIENT, slots))):
            return 0
        outside, replaced = found_outside(self, [*zip(slots.values(), reduced, strict=True)], inside)
        self.touched |= replaced
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

    def pass_ended(self, task: int, is_last: bool) -> bool:
        self._ends_passes = is_last
        self._drop_ended()
        if task == self._inside[0] and not self.touched:
            return False  # step() has reduced what the pass has touched
        self._window += 1
        return self._window >= self.per_step


def _coming_to(passes: weakref.ref[GradientPasses], slot: ParameterState) -> Callable[[torch.Tensor], None]:
    """The function that is called before the hook of ``slot``."""

    @uncompiled
    def coming(gradient: torch.Tensor) -> None:
        present = passes()
        if present is not None:
            present.gradient_comes(slot)

    return coming
