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

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from horovod.comparison.alike import made_at
from horovod.comparison.samples import samples_of
from horovod.core.errors import MismatchError
from horovod.core.lifecycle.context import is_initialized
from horovod.observe.step_clock import UPDATE, clock
from horovod.torch.ops.allreduce import allreduce_
from horovod.torch.optimizer.backward_passes import current_task
from horovod.torch.optimizer.gradient_hooks import hook_changes
from horovod.torch.optimizer.gradient_passes import AFTER_AN_EXCEPTION
from horovod.torch.optimizer.gradient_rounds import GradientRounds
from horovod.torch.optimizer.identity import OptimizerIdentity
from horovod.torch.optimizer.reduction_round import participants, reduce_together, register_optimizer
from horovod.torch.optimizer.settings import OptimizerSettings

_ZERO_GRAD_TOO_EARLY = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
    f"This would clear gradients that are being reduced. {AFTER_AN_EXCEPTION}"
)
_SKIPPED = (
    "optimizer.step() was called inside optimizer.skip_synchronize() while gradients are being reduced; "
    "call optimizer.synchronize() before the block"
)
_NOT_REDUCED = (
    "A gradient scaler was about to step with gradients that are not reduced: only a part of the passes of "
    "backward_passes_per_step were made, or all inside optimizer.no_sync(). Call optimizer.synchronize() before "
    "scaler.unscale_() or scaler.step()."
)
_OTHER_SETTINGS = (
    "The parameter {name!r} also belongs to a DistributedOptimizer that was made later and reduces with other settings. "
    "Delete that optimizer before you step with this one."
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


class GradientReduction(GradientRounds):
    """The distributed part of an optimizer that steps with reduced gradients. The optimizer's methods call it."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, settings: OptimizerSettings, identity: OptimizerIdentity
    ) -> None:
        self._skip = False
        self._looked = False
        self._later: tuple[int, list[GradientReduction]] = (-1, [])
        super().__init__(optimizer, settings, identity)
        register_optimizer(self)

    def synchronize(self) -> None:
        """Reduce all gradients that are not reduced. ``optimizer.synchronize()`` calls it.

        Raises:
            HorovodInternalError: the reduction failed.
            AssertionError: inside ``no_sync()``, or a gradient was changed before its reduction.
        """
        self.check_not_paused("synchronize()")
        self.complete()
        self._synchronized = True

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
        if not self._skip:
            self.check_not_paused("step()")
            if not self._scaler_stepped:
                self.complete()
            if not self._looked:
                self._look_at_others()
        elif self.under_way:
            raise AssertionError(_SKIPPED)
        clock.enter(UPDATE)
        return self._synchronized and not self._skip

    def _look_at_others(self) -> None:
        """Warn once about a parameter that the script has named and trains, but that is in no distributed optimizer."""
        if not self.parameters.communicates():
            return
        self._looked = True
        for parameter, name in self.parameters.names.items():
            if parameter not in self.parameters.slots and parameter.requires_grad and parameter.grad is not None:
                others = participants()
                if not any(
                    isinstance(each, GradientReduction) and parameter in each.parameters.slots for each in others
                ):
                    warnings.warn(_LEFT_OUT.format(name=name), stacklevel=4)
                    return

    def before_scaler_steps(self) -> None:
        if not self.parameters.communicates():
            return
        if self._skip and self.under_way:
            raise AssertionError(_SKIPPED)
        if not self._skip:
            if self._touched:
                raise AssertionError(_NOT_REDUCED)
            self.complete()
        self._count_step()
        self._stepped_with = self._named
        self._named, self._settled = 0, False  # the scaler may skip the step, which counts as one
        self._scaler_stepped = True

    def reducing(self, closure: Callable[[], Any], agree: bool) -> Callable[[], Any]:
        """A closure that calls ``closure`` and then reduces the gradients, and with ``agree`` also the loss."""
        self.check_not_paused("step()")
        if self.under_way:
            self.complete()

        def reducing_closure() -> Any:
            self._named, self._settled = 0, False
            with torch.enable_grad():
                loss = closure()
            self.complete()
            self.look()
            return self._agreed(loss) if agree and self.parameters.buckets else loss

        return reducing_closure

    def look(self) -> None:
        """Look at what the wrapped optimizer is about to step with, to compare it with the other ranks."""
        own = self._skip and not self._synchronized  # gradients may be this rank's own
        # A scaler has counted the step already.
        steps, reduced = (self._steps - 1, self._stepped_with) if self._scaler_stepped else (self._steps, self._named)
        if not own and not self._sampler.is_due(steps):
            return
        samples = samples_of(self.process_set.process_set_id) if self.name and self.parameters.communicates() else None
        if samples is None:
            return
        owner = samples.owner(self.name, made_at(self.line))
        if own:
            samples.drop(self.name)
        elif not owner.told:
            if not steps and not self._check.same_beginning:
                owner.told_parameters = True
            alike = self._check.same_numbers and samples.parameters_are_comparable(owner)
            self._sampler.take(samples, owner, steps, reduced & ~self._covered, alike)

    def end_step(self) -> None:
        """Called when the wrapped optimizer has used the gradients."""
        if not self._scaler_stepped:
            self._count_step()
        clock.stepped(self.name)
        self._rest()
        for other in self._takers():
            other._rest()
        if self._keeps_aside:
            for slot in self.parameters.slots.values():
                slot.tensor_address = 0 if slot.parameter.grad is None else slot.parameter.grad._cdata
        if self._debugger is not None:
            self._debugger.after_step(self.parameters.slots.values())

    def _count_step(self) -> None:
        self._steps += 1
        self._rounds = 0
        self.parameters.count.made += 1

    def zero_grad(self) -> None:
        if is_initialized():
            self.parameters.follow()
            self.prepare()
        if self.under_way or (self._passes and self._touched and not self._stays_local):
            raise AssertionError(_ZERO_GRAD_TOO_EARLY)
        for each in (self, *self._takers()):
            each.discard()

    def abandon(self) -> None:
        if is_initialized() and (samples := samples_of(self.process_set.process_set_id)) is not None:
            samples.drop(self.name)
        if self._passes or self.under_way:
            try:
                self.complete()  # sends all gradients, because other ranks may have sent theirs and wait
            except Exception:  # for example because the job has failed, and the script restores a state
                pass
        self.forget()

    def rewind(self) -> None:
        self._window = 0

    def complete(self) -> None:
        """Reduce all gradients that are not reduced: those of local passes, and those that the script has set itself."""
        for slot in self.parameters.follow():
            gradient = slot.parameter.grad
            if gradient is not None and gradient._version:
                self._error = self._error or AssertionError(_CHANGED_AFTER_ADDED.format(name=slot.name))
        self.prepare()
        if not self.parameters.communicates():
            return
        for other in self._takers(check=True):
            other.complete()
        task = current_task()
        outside = unsent = self.note_outside(inside=task >= 0)
        idle = False
        while unsent or self._is_due():
            unsent = 0
            before, idle = idle, reduce_together([self], final=True)
            if idle and before:
                raise MismatchError(_OTHER_ORDER.format(line=self.line), tensor=self.name)
        if task >= 0:
            self.stepped_inside(task, outside)

    def _is_due(self) -> bool:
        """Whether a round is needed before the step. The same on all ranks whose backward passes were the same."""
        if self._touched or self.under_way or any(each() is None for each in self._passes):
            return True
        wanted = self.parameters.trained & ~self._covered
        return not self._settled and self._named & wanted != wanted

    def _takers(self, check: bool = False) -> list[GradientReduction]:
        """The optimizers that were made later over some of the parameters. They have the hooks, so they reduce these gradients.

        Args:
            check: whether to check their settings, because this optimizer is about to step.

        Raises:
            AssertionError: one of them reduces with other settings.
        """
        if self._later[0] != hook_changes():
            self._later = hook_changes(), self._found_takers()
        if check:
            for other in self._later[1]:
                if not other.settings.reduces_as(self.settings):
                    name = next(
                        slot.name
                        for parameter, slot in self.parameters.slots.items()
                        if parameter in other.parameters.slots
                    )
                    raise AssertionError(_OTHER_SETTINGS.format(name=name))
        return self._later[1]

    def _found_takers(self) -> list[GradientReduction]:
        found: list[GradientReduction] = []
        covered = 0
        lost = [
            slot for slot in self.parameters.slots.values() if slot.hook is not None and not slot.hook.is_registered()
        ]
        for other in participants() if lost else ():
            if other is self or not isinstance(other, GradientReduction):
                continue
            for slot in lost:
                theirs = other.parameters.slots.get(slot.parameter)
                if theirs is not None and theirs.hook is not None and theirs.hook.is_registered():
                    covered |= slot.bit
                    if other not in found:
                        found.append(other)
        for slot in lost:
            if not slot.bit & covered:
                slot.hook = None  # the optimizer that had taken it is gone
        if any(slot.hook is None for slot in lost):
            self.parameters.listen()
        self._covered = covered
        return found

    def _agreed(self, loss: Any) -> Any:
        """The loss, reduced over the ranks like the gradients, so that the closure's caller decides the same on all ranks."""
        common = torch.as_tensor(loss).detach().to(torch.float64, copy=True)
        allreduce_(common, name=f"{self.name}.loss", op=self.settings.op, process_set=self.process_set)
        return common.to(loss) if isinstance(loss, torch.Tensor) else common.item()
