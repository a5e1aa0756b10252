"""One optimizer's part in the rounds in which all ranks reduce gradients: its record, its sends and its waits.

:mod:`horovod.torch.optimizer.reduction_round` explains rounds, and calls the methods.
"""

from __future__ import annotations

import warnings
from weakref import ref

import torch

from horovod.comm.reduction import ReduceOp
from horovod.comm.tuned import TunedSettings
from horovod.comparison.alike import is_compared
from horovod.core.lifecycle.context import running
from horovod.torch.optimizer.backward_passes import current_task
from horovod.torch.optimizer.bucket_sender import is_sparse, zero_gradient
from horovod.torch.optimizer.buckets import ParameterState
from horovod.torch.optimizer.gradient_passes import CHANGED_LOCALLY, GradientPasses
from horovod.torch.optimizer.gradient_views import is_only_added
from horovod.torch.optimizer.pass_record import Conclusion, TouchedGradients, as_bytes

_CHANGED = (
    "The gradient of {name!r} was changed while it was being reduced. A hook that changes gradients must be registered before "
    "the optimizer is made distributed."
)
_REMOVED = (
    "A hook of the script has removed the gradient of {name!r} inside backward(), before it could be reduced. Step and remove "
    "gradients after backward() has returned."
)
_REPLACED = (
    "The gradient of {name!r} was replaced after a step, and no backward pass has reached it since. The new gradient may be "
    "reduced already, or it may be this rank's own. With this op or compression it must not be reduced twice. Call "
    "optimizer.zero_grad() before you set gradients."
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
_HISTORY = 8
"""After this number of passes that touch only a part of a bucket, the bucket is cut into the parts that passes touch."""


class GradientRounds(GradientPasses):
    """The part of an optimizer that rounds call."""

    _hinted = False
    """Whether the script was told that gradients set by hand are reduced after its changes."""

    def told(self, final: bool) -> TouchedGradients:
        self._task = -2  # the next backward is a new pass
        joins = running().joins
        if self._joins != joins:  # before a join ends, ranks may have made different numbers of steps
            self._joins, self._steps, self._rounds = joins, 0, 0
            self._sampler.begin(self.name)
            self._check.joined()
        new = self.parameters.adopt_changes()
        if new:  # backward may have reached them before they had hooks
            self.prepare()
            self._touched |= sum(slot.bit for slot in new if slot.parameter.grad is not None)
        for slot in self._in(self._touched & (self._local | self._unsent())):
            self._check_kept(slot)
        touched = self._touched | (self._set_by_hand() if final else 0)
        self._touched = touched
        sparse = sum(slot.bit for slot in self._in(touched if self._sender.knows_sparse else 0) if is_sparse(slot))
        return TouchedGradients(
            self.name,
            self._steps,
            len(self.parameters.slots),
            as_bytes(touched),
            as_bytes(sparse),
            final,
            self._rounds,
            self._check.digest(self.parameters.optimizer, self.parameters.slots.values(), self._steps),
        )

    def _check_kept(self, slot: ParameterState) -> None:
        """Check that the script has neither removed nor changed a touched gradient that is not sent yet."""
        gradient = slot.parameter.grad
        if gradient is None:
            self._touched &= ~slot.bit
            if not slot.bit & self._local:
                self._error = self._error or AssertionError(_REMOVED.format(name=slot.name))
            return
        if gradient.layout is not torch.strided:
            self._sender.knows_sparse = True
        if slot.bit & self._local and not self._is_kept(slot, gradient):
            self._error = self._error or AssertionError(CHANGED_LOCALLY.format(name=slot.name))

    def _is_only_added(self, slot: ParameterState, gradient: torch.Tensor) -> bool:
        return is_only_added(slot, gradient, self.parameters.slots.values(), 0)

    def _is_kept(self, slot: ParameterState, gradient: torch.Tensor) -> bool:
        """Whether a local gradient is as the last pass has left it."""
        return gradient._cdata == slot.tensor_address and (
            gradient._version == slot.version or self._is_only_added(slot, gradient)
        )

    def _set_by_hand(self) -> int:
        """The set of gradients that no backward pass has touched since the last step, and that may be this rank's own.

        A gradient that is reduced already, and was not discarded since, may be averaged again, because it is the same on all
        ranks. It must not be summed again. So if reduced parts are kept aside, as for a sum, this method leaves such a gradient
        out even if the script has changed it, and refuses a new tensor in its place, which may be reduced or not.
        """
        found = 0
        for slot in self._in(self._all() & ~(self._touched | self._named | self._covered)):
            gradient = slot.parameter.grad
            if gradient is None:
                continue
            if self._keeps_aside and slot.bit & self._reduced:
                if slot.tensor_address != gradient._cdata:
                    self._error = self._error or AssertionError(_REPLACED.format(name=slot.name))
                continue
            found |= slot.bit
        backward = self._touched | self._named or current_task() >= 0  # which may have changed the gradients
        if found and not backward and not self._hinted and is_compared():
            self._hint(found)
        return found

    def _hint(self, found: int) -> None:
        """Warn once if the script has set all gradients, and has then changed them in place."""
        for slot in self._in(found):
            gradient = slot.parameter.grad
            if gradient is None or slot.reduced() is gradient or not gradient._version:
                return
        self._hinted = True
        warnings.warn(_CLIPPED_BY_HAND.format(line=self.line), stacklevel=7)

    def send_touched(self, conclusion: Conclusion) -> None:
        if conclusion.sparse or self._sender.knows_sparse:
            self._sender.knows_sparse = True
            for slot in self._in(conclusion.touched):
                slot.sparse = bool(slot.bit & conclusion.sparse)
        for slot in self._in(conclusion.touched & ~self._touched):
            old = slot.parameter.grad
            if old is None:
                slot.parameter.grad = zero_gradient(slot)
            elif self._keeps_aside:
                slot.aside, slot.parameter.grad = old, zero_gradient(slot)
        for bucket in self.parameters.buckets:
            wanted = conclusion.touched & bucket.mask
            if wanted and bucket.handle is None:
                self._sender.send(bucket if wanted == bucket.mask else bucket.part(wanted))

    def finish(self, conclusion: Conclusion, members: int) -> None:
        sent = self._sender.sent
        error: BaseException | None = None
        try:
            self._sender.advance()
        except BaseException as failure:
            error = failure
        for bucket in sent:
            try:
                bucket.wait(_CHANGED, self._is_only_added)
                for complete in bucket.after:
                    complete()
            except BaseException as failure:
                error = error or failure
        if conclusion.alike:
            self._check.agreed()
        else:
            number = self.process_set.process_set_id
            try:
                self._check.compare(
                    self.parameters.optimizer, self.parameters.slots.values(), self.name, number, self.line
                )
            except BaseException as failure:
                error = error or failure
        error = error or self._error
        if error is None and members < len(self.process_set.ranks or ()):
            error = self._missed(conclusion)
        if error is not None:
            self.forget()
            raise error
        for bucket in sent:
            bucket.reset()
        sent.clear()
        for slot in self._in(conclusion.touched if self._keeps_aside else 0):
            self._add_aside(slot)
        self._named |= conclusion.touched
        self._reduced |= conclusion.touched
        self._touched = self._local = 0
        self._window = 0
        self._rounds += 1
        self._settled = conclusion.final
        self._passes = self._open_passes()
        if self.settings.groups is None:
            self._cut_by_use(conclusion.touched)

    def tune(self, settings: TunedSettings) -> None:
        self.parameters.cut_anew(settings.bucket_bytes)

    @staticmethod
    def _add_aside(slot: ParameterState) -> None:
        old, new = slot.aside, slot.parameter.grad
        slot.aside = None
        if old is not None:
            with torch.no_grad():
                slot.parameter.grad = old if new is None else old.add_(new)
            slot.reduced, slot.version = ref(old), old._version

    def _missed(self, conclusion: Conclusion) -> BaseException | None:
        """An error if backward has added to a reduced gradient, whose average would lack the part of ranks that have joined."""
        if not self._keeps_aside and self.settings.op == ReduceOp.AVERAGE:
            for slot in self._in(conclusion.touched & self._reduced):
                if slot.parameter.grad is not None and slot.parameter.grad._version:
                    return AssertionError(_AFTER_JOIN.format(name=slot.name))
        return None

    def _cut_by_use(self, touched: int) -> None:
        """Cut buckets of which passes have repeatedly touched only parts, so that each part is sent as soon as it is ready."""
        for bucket in [*self.parameters.buckets]:
            reached = touched & bucket.mask
            if reached == bucket.mask:
                bucket.reached.clear()
            elif reached:
                bucket.reached.append(reached)
                if len(bucket.reached) == _HISTORY:
                    alike: dict[tuple[bool, ...], list[ParameterState]] = {}
                    for slot in bucket.slots:
                        alike.setdefault(tuple(bool(slot.bit & each) for each in bucket.reached), []).append(slot)
                    self.parameters.buckets.remove(bucket)
                    bucket.dissolve()
                    self.parameters.add_buckets([*alike.values()])
