"""Reduces an optimizer's gradients, in place, in the memory where backward left them.

Each backward pass reduces what any rank's pass has touched, and waits for it before it ends. ``step()`` only steps.

- A bucket is sent inside backward as soon as the pass has touched all its gradients. At the end of the pass the ranks tell each
  other what they have touched (:mod:`horovod.torch.optimizer.reduction_round`), and what is left of it is sent.
- What no rank has touched is left as it is.
- A gradient that a rank has not touched while others have counts as zeros. If it is older and reduced already, it is the same
  on all ranks, so the average of all, old parts included, is the old part plus the average of the new ones. Where this does
  not hold, for example for a sum, the old part is kept aside meanwhile.
- The first ``backward_passes_per_step - 1`` passes and those inside ``no_sync()`` only add to local gradients. Changing these
  is an error.
- ``step()`` and ``synchronize()`` reduce gradients that were set by hand and those of local passes. They begin a round unless
  all gradients are known to be reduced, which is the same on all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from horovod.comm.reduction import ReduceOp
from horovod.common.basics import is_initialized
from horovod.core.lifecycle.context import running
from horovod.core.lifecycle.process_set import ProcessSet
from horovod.torch.ops.allreduce import allreduce_
from horovod.torch.optimizer.backward_passes import BackwardPass, PassListener, current_task, enter
from horovod.torch.optimizer.bucket_sender import BucketSender, is_sparse, nothing
from horovod.torch.optimizer.buckets import NO_GRADIENT, Bucket, Slot
from horovod.torch.optimizer.distributed_part import DistributedPart
from horovod.torch.optimizer.gradient_hooks import GradientHook, taken
from horovod.torch.optimizer.identity import Identity
from horovod.torch.optimizer.parameters import heard_by
from horovod.torch.optimizer.pass_record import Conclusion, TouchedGradients, as_bytes
from horovod.torch.optimizer.reduction_round import enrol, participants, reduce_together
from horovod.torch.optimizer.settings import Settings

_AFTER_AN_EXCEPTION = (
    "After an exception inside backward(), call optimizer.synchronize() and then optimizer.zero_grad()."
)
_ZERO_GRAD_TOO_EARLY = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
    f"This would clear gradients that are being reduced. {_AFTER_AN_EXCEPTION}"
)
_BACKWARD_AGAIN = (
    f"backward() was called again after it had raised, while gradients are being reduced. {_AFTER_AN_EXCEPTION}"
)
_SKIPPED = (
    "optimizer.step() was called inside optimizer.skip_synchronize() while gradients are being reduced; "
    "call optimizer.synchronize() before the block"
)
_CHANGED = (
    "The gradient of {name!r} was changed while it was being reduced. A hook that changes gradients must be registered before "
    "the optimizer is made distributed."
)
_CHANGED_LOCALLY = (
    "The gradient of {name!r} was changed before its reduction: this rank's gradients are its own until the last pass of "
    "backward_passes_per_step, and inside optimizer.no_sync(). Change gradients after they are reduced, or call "
    "optimizer.synchronize() before."
)
_REMOVED = (
    "A hook of the script has removed the gradient of {name!r} inside backward(), before it could be reduced. Step and remove "
    "gradients after backward() has returned."
)
_NOT_REDUCED = (
    "A gradient scaler was about to step with gradients that are not reduced: only a part of the passes of "
    "backward_passes_per_step were made, or all inside optimizer.no_sync(). Call optimizer.synchronize() before "
    "scaler.unscale_() or scaler.step()."
)
_AFTER_JOIN = (
    "backward() has added to the reduced gradient of {name!r} while some ranks have joined (hvd.join()), whose part of the "
    "average would be missing. Call optimizer.zero_grad() before each backward pass, or run all passes but the last inside "
    "optimizer.no_sync()."
)
_OTHER_SETTINGS = (
    "The parameter {name!r} belongs to a DistributedOptimizer that was made later, too, and reduces with other settings. "
    "Delete that optimizer before you step with this one."
)
_HISTORY = 8
"""After so many passes that have touched only a part of a bucket, it is cut by what they have touched."""


class GradientReduction(DistributedPart, PassListener):
    """The distributed part of an optimizer that steps with reduced gradients.

    Sets of slots are integers:
        _touched: backward has added to the gradient since its last reduction.
        _local: of these, those whose last pass has ended. Nothing may change them.
        _named: some rank has touched the gradient since the last step, so it is reduced. The same on all ranks.
        _reduced: the gradient was reduced since the last ``zero_grad()``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, settings: Settings, identity: Identity) -> None:
        self._sender = BucketSender(settings)
        self._keeps_aside = not (settings.op in (ReduceOp.AVERAGE, ReduceOp.MIN, ReduceOp.MAX) and self._sender.exact)
        self._touched = self._local = self._named = self._reduced = 0
        self._settled = False
        self._window = 0
        self._task = -2
        self._passes: list[weakref.ref[BackwardPass]] = []
        self._stays_local = False
        self._steps = self._joins = 0
        self._scaler_stepped = False
        self._skip = False
        self._synchronized = False
        self._error: BaseException | None = None
        self._others: tuple[int, list[GradientReduction], int] = (-1, [], 0)
        super().__init__(optimizer, settings, identity)
        enrol(self)

    @property
    def process_set(self) -> ProcessSet:
        return self.settings.process_set

    @property
    def line(self) -> str:
        return self.settings.line

    @property
    def under_way(self) -> bool:
        """Whether a bucket is being reduced."""
        return any(not each.open for each in self._sendable())

    # What the optimizer's methods call

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
        """A block in which ``step()`` does not reduce the gradients."""
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
        elif self.under_way:
            raise AssertionError(_SKIPPED)
        return self._synchronized and not self._skip

    def before_scaler_steps(self) -> None:
        if not self.communicates():
            return
        if self._skip and self.under_way:
            raise AssertionError(_SKIPPED)
        if not self._skip:
            if self._touched:
                raise AssertionError(_NOT_REDUCED)
            self.complete()
        self._steps += 1
        self._named, self._settled = 0, False  # the scaler may skip the step, which counts as one
        self._scaler_stepped = True

    def reducing(self, closure: Callable[[], Any], agree: bool) -> Callable[[], Any]:
        """A closure that calls ``closure`` and then reduces the gradients; the loss too, if ``agree``."""
        self.check_not_paused("step()")
        if self.under_way:
            self.complete()

        def reducing_closure() -> Any:
            self._named, self._settled = 0, False
            with torch.enable_grad():
                loss = closure()
            self.complete()
            return self._agreed(loss) if agree and self.buckets else loss

        return reducing_closure

    def end_step(self) -> None:
        """Called when the wrapped optimizer has used the gradients."""
        if not self._scaler_stepped:
            self._steps += 1
        self._rest()
        for other in self._takers():
            other._rest()
        if self._keeps_aside:
            for slot in self.slots.values():
                gradient = slot.parameter.grad
                slot.old = (0, 0) if gradient is None else (gradient._cdata, gradient._version)

    def zero_grad(self) -> None:
        if is_initialized():
            self.look_again()
            self.prepare()
        if self.under_way or (self._passes and not self._stays_local):
            raise AssertionError(_ZERO_GRAD_TOO_EARLY)
        for each in (self, *self._takers()):
            each._rest()
            each._reduced = 0
            each._passes.clear()
            each._error = None
        if self._keeps_aside:
            for slot in self.slots.values():
                slot.aside = None

    def abandon(self) -> None:
        if self._passes or self.under_way:
            try:
                self.complete()  # also what this rank has not sent, for others may have
            except Exception:  # for example that the job has failed, which is why a state is loaded
                pass
        self.forget()

    def rewind(self) -> None:
        self._window = 0

    def forget(self) -> None:
        for bucket in self._sendable():
            bucket.reset()
        for slot in self.slots.values():
            if slot.aside is not None:
                slot.parameter.grad, slot.aside = slot.aside, None
        self._rest()
        self._reduced = 0
        self._passes.clear()
        self._error = None

    def _rest(self) -> None:
        """Between two steps: no gradient is known to be reduced for the next one."""
        self._touched = self._local = self._named = 0
        self._settled = self._synchronized = self._scaler_stepped = False
        self._window = 0

    def new_generation(self) -> None:
        self.forget()
        self._steps = self._joins = 0

    def renumbered(self, moved: Callable[[int], int]) -> None:
        self._touched, self._local = moved(self._touched), moved(self._local)
        self._named, self._reduced = moved(self._named), moved(self._reduced)

    # Backward

    def gradient_is_ready(self, slot: Slot, gradient: torch.Tensor | None) -> None:
        """Called when a backward pass has added to a gradient.

        Raises:
            AssertionError: backward has raised before, and gradients are being reduced.
        """
        task = current_task()
        if task != self._task:
            self._begin_pass(task, slot, gradient)
        if slot.bit & self._local:
            self._check_added(slot, gradient)
        self._touched |= slot.bit
        if self._stays_local:
            self._local |= slot.bit
            if gradient is not None:
                slot.version, slot.place = gradient._version, gradient._cdata
            return
        bucket = slot.bucket
        if bucket is None:
            return  # this rank does not reduce in this generation
        bucket.waiting -= 1
        if not bucket.waiting and bucket.open:
            last = self.ends_passes and not any(each.waiting and each.mask & self.trained for each in self.buckets)
            self._sender.send(bucket, awaited=last)

    def _begin_pass(self, task: int, slot: Slot, gradient: torch.Tensor | None) -> None:
        """The first hook in a pass, or in what is left of a pass after one inside it."""
        if any(each() is None for each in self._passes):
            if self.under_way:
                slot.version = NO_GRADIENT if gradient is None else gradient._version
                raise AssertionError(_BACKWARD_AGAIN)
            self._passes.clear()
        self._task = task
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

    def hook(self, slot: Slot) -> GradientHook:
        if not self._keeps_aside:
            return super().hook(slot)
        return GradientHook(slot.parameter, heard_by(weakref.ref(self), slot), _coming_to(weakref.ref(self), slot))

    def gradient_comes(self, slot: Slot) -> None:
        """Called before a backward pass adds to a gradient, where the reduced part of it must be kept aside."""
        old = slot.parameter.grad
        if old is not None and slot.aside is None and slot.bit & self._reduced & ~self._touched:
            slot.aside, slot.parameter.grad = old, None

    def _check_added(self, slot: Slot, gradient: torch.Tensor | None) -> None:
        """Check that between two passes nothing but backward has changed a local gradient. The error is raised after the
        reduction, because other ranks wait for this one."""
        if gradient is None or gradient.layout is not torch.strided or gradient.requires_grad:
            return  # sums of these are new tensors
        added = gradient._cdata == slot.place and gradient._version == slot.version + 1
        thrown_away = gradient._cdata != slot.place and gradient._version == 0
        if not added and not thrown_away:
            self._error = self._error or AssertionError(_CHANGED_LOCALLY.format(name=slot.name))
        self._local &= ~slot.bit

    def pass_ended(self) -> bool:
        self._passes = [each for each in self._passes if (found := each()) is not None and not found.ended]
        self._window += 1
        return self._window >= self.passes

    # A round

    def complete(self) -> None:
        """Reduce all gradients that are not reduced: those of local passes, and those that were set by hand."""
        self.look_again()
        self.prepare()
        if not self.communicates():
            return
        for other in self._takers(check=True):
            other.complete()
        while self._is_due():
            reduce_together([self], final=True)

    def _is_due(self) -> bool:
        """Whether a round must be made before the step. As far as backward has done the same, all ranks find the same."""
        if self._touched or self._passes or self.under_way:
            return True
        wanted = self.trained & ~self._others[2]
        return not self._settled and self._named & wanted != wanted

    def told(self, final: bool) -> TouchedGradients:
        self._task = -2  # what backward does next is another pass
        joins = running().joins
        if self._joins != joins:  # until then ranks may have made different numbers of steps
            self._joins, self._steps = joins, 0
        for slot in self._in(self._touched & (self._local | self._unsent())):
            self._check_kept(slot)
        touched = self._touched | (self._set_by_hand() if final else 0)
        self._touched = touched
        sparse = sum(slot.bit for slot in self._in(touched if self._sender.knows_sparse else 0) if is_sparse(slot))
        return TouchedGradients(
            self.name, self._steps, len(self.slots), as_bytes(touched), as_bytes(sparse), final and not self._passes
        )

    def _check_kept(self, slot: Slot) -> None:
        """Check a touched gradient that is not sent yet."""
        gradient = slot.parameter.grad
        if gradient is None:
            self._touched &= ~slot.bit
            if not slot.bit & self._local:
                self._error = self._error or AssertionError(_REMOVED.format(name=slot.name))
            return
        if gradient.layout is not torch.strided:
            self._sender.knows_sparse = True
        if slot.bit & self._local and (gradient._cdata, gradient._version) != (slot.place, slot.version):
            self._error = self._error or AssertionError(_CHANGED_LOCALLY.format(name=slot.name))

    def _set_by_hand(self) -> int:
        """The gradients that no backward pass has touched since the last step, and that may be this rank's own."""
        found = 0
        for slot in self._in(self._all() & ~(self._touched | self._named | self._others[2])):
            gradient = slot.parameter.grad
            if gradient is None or (self._keeps_aside and slot.old == (gradient._cdata, gradient._version)):
                continue
            found |= slot.bit
        return found

    def send_touched(self, conclusion: Conclusion) -> None:
        if conclusion.sparse or self._sender.knows_sparse:
            self._sender.knows_sparse = True
            for slot in self._in(conclusion.touched):
                slot.sparse = bool(slot.bit & conclusion.sparse)
        for slot in self._in(conclusion.touched & ~self._touched):
            old = slot.parameter.grad
            if old is None:
                slot.parameter.grad = nothing(slot)
            elif self._keeps_aside:
                slot.aside, slot.parameter.grad = old, nothing(slot)
        for bucket in self.buckets:
            wanted = conclusion.touched & bucket.mask
            if wanted and bucket.open:
                self._sender.send(bucket if wanted == bucket.mask else bucket.part(wanted))

    def finish(self, conclusion: Conclusion, members: int) -> None:
        sent = [bucket for bucket in self._sendable() if not bucket.open]
        error: BaseException | None = None
        try:
            self._sender.advance(sent)
        except BaseException as failure:
            error = failure
        for bucket in sent:
            try:
                bucket.wait(_CHANGED)
                for complete in bucket.after:
                    complete()
            except BaseException as failure:
                error = error or failure
        error = error or self._error or self._missed(conclusion, members)
        if error is not None:
            self.forget()
            raise error
        for bucket in sent:
            bucket.reset()
        for slot in self._in(conclusion.touched if self._keeps_aside else 0):
            self._add_aside(slot)
        self._named |= conclusion.touched
        self._reduced |= conclusion.touched
        self._touched = self._local = 0
        self._window = 0
        self._settled = conclusion.final
        self._passes = [each for each in self._passes if (found := each()) is not None and not found.ended]
        if self.settings.groups is None:
            self._cut_by_use(conclusion.touched)

    @staticmethod
    def _add_aside(slot: Slot) -> None:
        old, new = slot.aside, slot.parameter.grad
        slot.aside = None
        if old is not None:
            with torch.no_grad():
                slot.parameter.grad = old if new is None else old.add_(new)

    def _missed(self, conclusion: Conclusion, members: int) -> BaseException | None:
        """The error if ranks that have joined would have had a part in a gradient that was reduced before."""
        if (
            members < len(self.process_set.ranks or ())
            and not self._keeps_aside
            and self.settings.op == ReduceOp.AVERAGE
        ):
            for slot in self._in(conclusion.touched & self._reduced):
                if slot.parameter.grad is not None and slot.parameter.grad._version:
                    return AssertionError(_AFTER_JOIN.format(name=slot.name))
        return None

    def _cut_by_use(self, touched: int) -> None:
        """Cut buckets of which passes have touched only parts, so that each part is sent as soon as it is ready."""
        for bucket in [*self.buckets]:
            reached = touched & bucket.mask
            if reached == bucket.mask:
                bucket.reached.clear()
            elif reached:
                bucket.reached.append(reached)
                if len(bucket.reached) == _HISTORY:
                    alike: dict[tuple[bool, ...], list[Slot]] = {}
                    for slot in bucket.slots:
                        alike.setdefault(tuple(bool(slot.bit & each) for each in bucket.reached), []).append(slot)
                    self.buckets.remove(bucket)
                    bucket.dissolve()
                    self.add_buckets([*alike.values()])

    # Sets of slots

    def _all(self) -> int:
        return (1 << len(self.slots)) - 1

    def _in(self, mask: int) -> Iterator[Slot]:
        return (slot for slot in self.slots.values() if slot.bit & mask) if mask else iter(())

    def _unsent(self) -> int:
        return sum(bucket.mask for bucket in self.buckets if bucket.open)

    def _sendable(self) -> Iterator[Bucket]:
        for bucket in self.buckets:
            yield bucket
            yield from bucket.parts()

    def _takers(self, check: bool = False) -> list[GradientReduction]:
        """The optimizers that were made later over some of the parameters. Their hooks hear of these, so they reduce them.

        Args:
            check: this optimizer is about to step.

        Raises:
            AssertionError: one reduces with other settings.
        """
        if self._others[0] != taken():
            self._others = (taken(), *self._found_takers())
        if check:
            for other in self._others[1]:
                if not other.settings.reduces_as(self.settings):
                    name = next(slot.name for parameter, slot in self.slots.items() if parameter in other.slots)
                    raise AssertionError(_OTHER_SETTINGS.format(name=name))
        return self._others[1]

    def _found_takers(self) -> tuple[list[GradientReduction], int]:
        found: list[GradientReduction] = []
        covered = 0
        lost = [slot for slot in self.slots.values() if slot.hook is not None and not slot.hook.is_registered()]
        for other in participants() if lost else ():
            if other is self or not isinstance(other, GradientReduction):
                continue
            for slot in lost:
                theirs = other.slots.get(slot.parameter)
                if theirs is not None and theirs.hook is not None and theirs.hook.is_registered():
                    covered |= slot.bit
                    if other not in found:
                        found.append(other)
        for slot in lost:
            if not slot.bit & covered:
                slot.hook = None  # the optimizer that had taken it is gone
        if any(slot.hook is None for slot in lost):
            self._listen()
        return found, covered

    def _agreed(self, loss: Any) -> Any:
        """The loss, reduced over the ranks like the gradients, so that the closure's caller decides the same on all ranks."""
        common = torch.as_tensor(loss).detach().to(torch.float64, copy=True)
        allreduce_(common, name=f"{self.name}.loss", op=self.settings.op, process_set=self.process_set)
        return common.to(loss) if isinstance(loss, torch.Tensor) else common.item()


def _coming_to(optimizer: weakref.ref[GradientReduction], slot: Slot) -> Callable[[torch.Tensor], None]:
    """The function that is called before the hook of ``slot``."""

    def coming(gradient: torch.Tensor) -> None:
        present = optimizer()
        if present is not None:
            present.gradient_comes(slot)

    return coming
