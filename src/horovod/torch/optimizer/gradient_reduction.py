"""Reduces an optimizer's gradients in place, in the memory where backward left them.

Each backward pass reduces the gradients that any rank's pass has touched, and waits for the reductions before it ends.
``step()`` only steps.

- A bucket is sent inside backward as soon as the pass has touched all its gradients. At the end of the pass the ranks exchange
  which gradients they have touched (:mod:`horovod.torch.optimizer.reduction_round`), and send those not sent yet.
- A gradient that no rank has touched does not change.
- A gradient that another rank has touched, and this rank has not, counts as zeros. An older, reduced part of the gradient is
  the same on all ranks. So the average over all ranks, old parts included, is the old part plus the average of the new parts.
  If this does not hold, for example for a sum, the old part is kept aside during the reduction.
- The first ``backward_passes_per_step - 1`` passes and those inside ``no_sync()`` only add to local gradients. The script must
  not change these, otherwise an error is raised.
- ``step()`` and ``synchronize()`` reduce gradients that the script has set itself, and those of local passes. They begin a
  round unless all gradients are known to be reduced. This knowledge is the same on all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from horovod.comparison.alike import made_at
from horovod.comparison.looks import looks_in
from horovod.comparison.samples import Samples, samples_of
from horovod.core.errors import MismatchError
from horovod.core.lifecycle.context import is_initialized
from horovod.observe.call_site import warn
from horovod.observe.step_clock import UPDATE, clock
from horovod.torch.ops.allreduce import allreduce_
from horovod.torch.optimizer.backward_passes import current_task
from horovod.torch.optimizer.bucket_sender import BucketSender
from horovod.torch.optimizer.counted_passes import paused_error
from horovod.torch.optimizer.distributed_part import DistributedPart
from horovod.torch.optimizer.gradient_hooks import GradientHook
from horovod.torch.optimizer.gradient_passes import GradientPasses
from horovod.torch.optimizer.gradient_rounds import GradientRounds
from horovod.torch.optimizer.parameters import OptimizerParameters
from horovod.torch.optimizer.reduction_round import reduce_together, register_optimizer
from horovod.torch.uncompiled import uncompiled

_SKIPPED = (
    "optimizer.step() was called inside optimizer.skip_synchronize() while gradients are being reduced; "
    "call optimizer.synchronize() before the block"
)
_NOT_REDUCED = (
    "A gradient scaler was about to step with gradients that are not reduced: only a part of the passes of "
    "backward_passes_per_step were made, or all inside optimizer.no_sync(). Call optimizer.synchronize() before "
    "scaler.unscale_() or scaler.step()."
)
_CHANGED_AFTER_ADDED = (
    "The parameter {name!r} was added to the optimizer after its last zero_grad() or step(), and its gradient was changed "
    "before it was reduced; backward() has reached no older parameter since then. Call optimizer.zero_grad() after "
    "replacing parameters."
)
_OTHER_ORDER = (
    "This rank steps with the optimizer made at {line}, while other ranks step with other optimizers, and no rank has "
    "gradients to reduce. Every rank must step its optimizers in the same order."
)
_LEFT_OUT = (
    "The parameter {name!r} has a gradient, but belongs to no DistributedOptimizer, so the gradient is this rank's own. If it "
    "is clipped together with the others, as by clip_grad_norm_(model.parameters()), each rank clips by a different norm. "
    "Freeze it with requires_grad_(False), or clip only the parameters of the optimizer."
)
_OTHER_SETTINGS = (
    "The parameter {name!r} also belongs to a DistributedOptimizer that was made later and reduces with other settings. "
    "Delete that optimizer before you step with this one."
)


@uncompiled
class GradientReduction(DistributedPart):
    """The distributed part of an optimizer that steps with reduced gradients. The optimizer's methods call it.

    Attributes:
        passes: what is known of its gradients.
        rounds: the optimizer in rounds.
    """

    passes: GradientPasses

    def __init__(self, parameters: OptimizerParameters) -> None:
        sender = BucketSender(parameters.settings)
        passes = GradientPasses(parameters, sender)
        super().__init__(parameters, passes)
        self.rounds = GradientRounds(parameters, passes, sender)
        self._later = _LaterOptimizers(parameters, passes)
        self._skip = False
        self._looked = False
        parameters.report_to(passes, self.rounds)
        register_optimizer(self.rounds)
        _parts[next(_count)] = self

    def synchronize(self) -> None:
        """Reduce all gradients that are not reduced. ``optimizer.synchronize()`` calls it.

        Raises:
            HorovodInternalError: the reduction failed.
            AssertionError: inside ``no_sync()``, or a gradient was changed before its reduction.
        """
        if self.passes.is_paused:
            raise paused_error("synchronize()")
        self.complete()
        self.passes.note_synchronized()

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """A context in which ``step()`` does not reduce the gradients."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    def before_step(self) -> bool:
        """Reduce the gradients that are not reduced. Called before every step of the wrapped optimizer.

        Returns:
            Whether the script has called ``synchronize()`` before, outside of ``skip_synchronize()``.

        Raises:
            AssertionError: inside ``no_sync()``, or inside ``skip_synchronize()`` while gradients are being reduced.
        """
        passes = self.passes
        if not self._skip:
            if passes.is_paused:
                raise paused_error("step()")
            if not passes.scaler_steps:
                self.complete()
            if not self._looked:
                self._look_at_others()
        elif passes.under_way:
            raise AssertionError(_SKIPPED)
        clock.enter(UPDATE)
        return passes.is_synchronized and not self._skip

    def _look_at_others(self) -> None:
        """Warn once about a parameter that the script has named and trains, but that is in no distributed optimizer."""
        if not self.parameters.communicates():
            return
        self._looked = True
        for parameter, name in self.parameters.names.items():
            if parameter.requires_grad and parameter.grad is not None and not _reduces_any(parameter):
                warn(_LEFT_OUT.format(name=name))
                return

    def before_scaler_steps(self) -> None:
        if not self.parameters.communicates():
            return
        if self._skip and self.passes.under_way:
            raise AssertionError(_SKIPPED)
        if not self._skip:
            if self.passes.touched:
                raise AssertionError(_NOT_REDUCED)
            self.complete()
        self.rounds.count_step()
        self.passes.note_scaler()

    def reducing(self, closure: Callable[[], Any], agree: bool) -> Callable[[], Any]:
        """A closure that calls ``closure`` and then reduces the gradients, and with ``agree`` also the loss."""
        if self.passes.is_paused:
            raise paused_error("step()")
        if self.passes.under_way:
            self.complete()

        def reducing_closure() -> Any:
            self.passes.unsettle()
            with torch.enable_grad():
                loss = closure()
            self.complete()
            self.look()
            return self._agreed(loss) if agree and self.parameters.buckets else loss

        return reducing_closure

    def look(self) -> None:
        """Look at what the wrapped optimizer is about to step with, to compare it with the other ranks."""
        passes, rounds = self.passes, self.rounds
        own = self._skip and not passes.is_synchronized  # gradients may be this rank's own
        # A scaler has counted the step already.
        steps, reduced = (
            (rounds.steps - 1, passes.stepped_with) if passes.scaler_steps else (rounds.steps, passes.named)
        )
        if not own and not looks_in(steps, rounds.sampler.number):
            return
        samples = self._samples() if rounds.name and self.parameters.communicates() else None
        if samples is None:
            return
        owner = samples.owner(rounds.name, made_at(rounds.line))
        if own:
            samples.drop(rounds.name)
        elif not owner.reported:
            if not steps and not rounds.check.same_beginning:
                owner.parameters_reported = True
            alike = rounds.check.same_numbers and samples.parameters_are_comparable(owner)
            rounds.sampler.take(samples, owner, steps, reduced & ~passes.covered, alike)

    def _samples(self) -> Samples | None:
        return samples_of(self.settings.process_set.process_set_id)

    def end_step(self) -> None:
        """Called when the wrapped optimizer has used the gradients."""
        if not self.passes.scaler_steps:
            self.rounds.count_step()
        clock.stepped(self.rounds.name)
        for other in self._later.found():
            other.passes.rest()
        self.passes.stepped()

    def zero_grad(self) -> None:
        super().zero_grad()
        for other in self._later.found():
            other.passes.drop()

    def abandon(self) -> None:
        if is_initialized() and (samples := self._samples()) is not None:
            samples.drop(self.rounds.name)
        if self.passes.have_begun:
            try:
                self.complete()  # sends all gradients, because other ranks may have sent theirs and wait
            except Exception:  # for example because the job has failed, and the script restores a state
                pass
        self.passes.forget()

    def complete(self) -> None:
        """Reduce all gradients that are not reduced: those of local passes, and those that the script has set itself."""
        parameters, passes, rounds = self.parameters, self.passes, self.rounds
        for slot in parameters.follow():
            gradient = slot.parameter.grad
            if gradient is not None and gradient._version:
                passes.fail(AssertionError(_CHANGED_AFTER_ADDED.format(name=slot.name)))
        parameters.prepare()
        if not parameters.reduces:
            return
        if later := self._later.found():
            self._later.check()
            for other in later:
                other.complete()
        task = current_task()
        outside = unsent = passes.note_outside(inside=task >= 0)
        idle = False
        while unsent or passes.is_due():
            unsent = 0
            before, idle = idle, reduce_together([rounds], final=True)
            if idle and before:
                raise MismatchError(_OTHER_ORDER.format(line=rounds.line), tensor=rounds.name)
        if task >= 0:
            passes.stepped_inside(task, outside)

    def _agreed(self, loss: Any) -> Any:
        """The loss, reduced over the ranks like the gradients, so that the closure's caller decides the same on all ranks."""
        common = torch.as_tensor(loss).detach().to(torch.float64, copy=True)
        allreduce_(common, name=f"{self.rounds.name}.loss", op=self.settings.op, process_set=self.settings.process_set)
        return common.to(loss) if isinstance(loss, torch.Tensor) else common.item()


_parts: weakref.WeakValueDictionary[int, GradientReduction] = weakref.WeakValueDictionary()
"""The parts of the optimizers of this process that reduce gradients, in the order in which they were made."""
_count = count()


def _reduces_any(parameter: torch.Tensor) -> bool:
    """Whether any optimizer of this process reduces gradients of the parameter."""
    return any(parameter in each.parameters.slots for each in _parts.values())


class _LaterOptimizers:
    """The optimizers that were made later over some parameters of one optimizer.

    Args:
        parameters, passes: of that optimizer.
    """

    def __init__(self, parameters: OptimizerParameters, passes: GradientPasses) -> None:
        self._parameters = parameters
        self._passes = passes
        self._found: list[GradientReduction] = []
        self._at = -1

    def found(self) -> list[GradientReduction]:
        """Their parts. They reduce the gradients of these parameters."""
        if self._at != GradientHook.changes:
            self._at = GradientHook.changes
            self._found = self._look()
        return self._found

    def check(self) -> None:
        """Check the settings of those that :meth:`found` returns. Raises AssertionError if one reduces with others."""
        for other in self._found:
            if not other.settings.reduces_as(self._parameters.settings):
                shared = (slot.name for p, slot in self._parameters.slots.items() if p in other.parameters.slots)
                raise AssertionError(_OTHER_SETTINGS.format(name=next(shared)))

    def _look(self) -> list[GradientReduction]:
        slots = self._parameters.slots.values()
        found: list[GradientReduction] = []
        covered = 0
        lost = [slot for slot in slots if slot.hook is not None and not slot.hook.is_registered()]
        for other in list(_parts.values()) if lost else ():
            if other.parameters is self._parameters:
                continue
            for slot in lost:
                theirs = other.parameters.slots.get(slot.parameter)
                if theirs is not None and theirs.hook is not None and theirs.hook.is_registered():
                    covered |= slot.bit
                    if other not in found:
                        found.append(other)
        if left := [slot for slot in lost if not slot.bit & covered]:
            self._parameters.listen_again(left)
        self._passes.cover(covered)
        return found
