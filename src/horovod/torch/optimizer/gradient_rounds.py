"""One optimizer's part in the rounds in which all ranks reduce gradients: its record, its sends and its waits.

:mod:`horovod.torch.optimizer.reduction_round` explains rounds, and calls the methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from horovod.comm.reduction import ReduceOp
from horovod.comm.tuned import TunedSettings
from horovod.comparison.alike import is_compared
from horovod.core.lifecycle.context import running
from horovod.observe.call_site import warn
from horovod.torch.optimizer.backward_passes import current_task
from horovod.torch.optimizer.bucket_sender import BucketSender, is_sparse, zero_gradient
from horovod.torch.optimizer.buckets import ParameterState
from horovod.torch.optimizer.gradient_passes import CHANGED_LOCALLY, GradientPasses
from horovod.torch.optimizer.gradient_views import is_as_left, is_only_added
from horovod.torch.optimizer.parameters import OptimizerParameters, ParameterObserver
from horovod.torch.optimizer.pass_record import Conclusion, TouchedGradients, as_bytes
from horovod.torch.optimizer.reduction_round import Participant
from horovod.torch.optimizer.script_gradients import set_by_hand, were_changed
from horovod.torch.optimizer.step_check import StepCheck
from horovod.torch.optimizer.step_samples import StepSampler

_CHANGED = (
    "The gradient of {name!r} was changed while it was being reduced. A hook that changes gradients must be registered before "
    "the optimizer is made distributed."
)
_REMOVED = (
    "A hook of the script has removed the gradient of {name!r} inside backward(), before it could be reduced. Step and remove "
    "gradients after backward() has returned."
)
_AFTER_JOIN = (
    "backward() has added to the reduced gradient of {name!r} while some ranks have joined (hvd.join()). Their part of the "
    "average would be missing. Call optimizer.zero_grad() before each backward pass, or run all passes but the last inside "
    "optimizer.no_sync()."
)
_CLIPPED_BY_HAND = (
    "The gradients of the optimizer made at {line} were set by the script and then changed, and step() reduces them only now. "
    "If they were clipped by their norm, each rank has clipped its own by a different norm. Call optimizer.synchronize() "
    "before you change them, and then step() inside optimizer.skip_synchronize()."
)


class GradientRounds(Participant, ParameterObserver):
    """One optimizer in rounds.

    Args:
        parameters: of the optimizer.
        passes: what is known of its gradients.
        sender: sends its buckets.

    Attributes:
        steps: the number of steps in this generation, since all ranks last joined.
        check: compares hyper-parameters and, at the first step, parameters.
        sampler: looks at what the optimizer steps with. The next round compares it.
    """

    def __init__(self, parameters: OptimizerParameters, passes: GradientPasses, sender: BucketSender) -> None:
        settings = parameters.settings
        self.name, self.process_set, self.line = "", settings.process_set, settings.line
        self.steps = 0
        self.check = StepCheck()
        self.sampler = StepSampler()
        self._parameters = parameters
        self._passes = passes
        self._sender = sender
        self._rounds = 0  # since the last step
        self._joins = 0
        self._hinted = False  # that gradients set by hand are reduced after the script's changes
        passes.reduced_by(self)

    @property
    def is_named(self) -> bool:
        return self._parameters.identity.is_named

    def prepare(self) -> None:
        self._parameters.prepare()

    def is_elsewhere(self) -> bool:
        return self._passes.is_elsewhere()

    def new_generation(self) -> None:
        self.name = self._parameters.name
        self.steps = self._joins = self._rounds = 0
        self.check.begin()
        self.sampler.begin(self.name)

    def renumbered(self, moved: Callable[[int], int]) -> None:
        self.sampler.renumbered([*self._parameters.slots.values()])

    def count_step(self) -> None:
        self.steps += 1
        self._rounds = 0
        self._parameters.count.made += 1

    def touched(self, final: bool) -> TouchedGradients:
        parameters, passes = self._parameters, self._passes
        joins = running().joins
        if self._joins != joins:  # before a join ends, ranks may have made different numbers of steps
            self._joins, self.steps, self._rounds = joins, 0, 0
            self.sampler.begin(self.name)
            self.check.joined()
        new = parameters.adopt_changes()
        touched = passes.touched
        if new:  # backward may have reached them before they had hooks
            parameters.prepare()
            touched = passes.touched | sum(slot.bit for slot in new if slot.parameter.grad is not None)
        unsent = touched & passes.local
        for bucket in parameters.buckets:
            if bucket.handle is None:
                unsent |= touched & bucket.mask
        for slot in self._in(unsent) if unsent else ():
            if not self._is_there(slot):
                touched &= ~slot.bit
        if final:
            touched |= self._set_by_hand(touched)
        passes.note_reported(touched)
        sparse = sum(slot.bit for slot in self._in(touched) if is_sparse(slot)) if self._sender.knows_sparse else 0
        return TouchedGradients(
            self.name,
            self.steps,
            len(parameters.slots),
            as_bytes(touched),
            as_bytes(sparse),
            final,
            self._rounds,
            self.check.digest(parameters.optimizer, parameters.slots.values(), self.steps),
        )

    def _in(self, mask: int) -> Iterator[ParameterState]:
        return (slot for slot in self._parameters.slots.values() if slot.bit & mask)

    def _is_there(self, slot: ParameterState) -> bool:
        """Whether the script has not removed a touched gradient that is not sent yet. Checks that it has not changed it."""
        gradient, local = slot.parameter.grad, slot.bit & self._passes.local
        if gradient is None:
            if not local:
                self._passes.fail(AssertionError(_REMOVED.format(name=slot.name)))
            return False
        if gradient.layout is not torch.strided:
            self._sender.note_sparse(())
        if local and not is_as_left(slot, gradient, self._parameters.slots.values()):
            self._passes.fail(AssertionError(CHANGED_LOCALLY.format(name=slot.name)))
        return True

    def _set_by_hand(self, touched: int) -> int:
        slots = self._parameters.slots.values()
        found = set_by_hand(self._passes, slots, touched)
        backward = touched | self._passes.named or current_task() >= 0  # which may have changed the gradients
        if found and not backward and not self._hinted and is_compared() and were_changed(slots, found):
            self._hinted = True
            warn(_CLIPPED_BY_HAND.format(line=self.line))
        return found

    def send_touched(self, conclusion: Conclusion) -> None:
        if conclusion.sparse or self._sender.knows_sparse:
            self._sender.note_sparse(self._in(conclusion.touched), conclusion.sparse)
        missing = conclusion.touched & ~self._passes.touched
        for slot in self._in(missing) if missing else ():
            if slot.parameter.grad is None:
                slot.parameter.grad = zero_gradient(slot)
            elif self._passes.keeps_aside:
                slot.put_aside(zero_gradient(slot))
        for bucket in self._parameters.buckets:
            wanted = conclusion.touched & bucket.mask
            if wanted and bucket.handle is None:
                self._sender.send(bucket if wanted == bucket.mask else bucket.part(wanted))

    def finish(self, conclusion: Conclusion, members: int) -> None:
        passes = self._passes
        error = self._sender.wait(_CHANGED, self._is_only_added)
        if conclusion.alike:
            self.check.agreed()
        else:
            number = self.process_set.process_set_id
            try:
                self.check.compare(
                    self._parameters.optimizer, self._parameters.slots.values(), self.name, number, self.line
                )
            except BaseException as failure:
                error = error or failure
        error = error or passes.error
        if error is None and members < len(self.process_set.ranks or ()):
            error = self._missed(conclusion)
        if error is not None:
            self.forget()
            raise error
        self._sender.reset()
        for slot in self._in(conclusion.touched) if passes.keeps_aside else ():
            slot.add_aside()
        passes.note_reduced(conclusion.touched, conclusion.final)
        self._rounds += 1
        self._parameters.cut_by_use(conclusion.touched)

    def _is_only_added(self, slot: ParameterState, gradient: torch.Tensor) -> bool:
        return is_only_added(slot, gradient, self._parameters.slots.values(), 0)

    def forget(self) -> None:
        self._passes.note_reported(0)
        self._passes.forget()

    def tune(self, settings: TunedSettings) -> None:
        self._parameters.cut_anew(settings.bucket_bytes)

    def _missed(self, conclusion: Conclusion) -> BaseException | None:
        """An error if backward has added to a reduced gradient, whose average would lack the part of ranks that have joined."""
        if not self._passes.keeps_aside and self._parameters.settings.op == ReduceOp.AVERAGE:
            for slot in self._in(conclusion.touched & self._passes.reduced):
                if slot.parameter.grad is not None and slot.parameter.grad._version:
                    return AssertionError(_AFTER_JOIN.format(name=slot.name))
        return None
