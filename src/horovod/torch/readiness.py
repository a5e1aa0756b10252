"""Which of an optimizer's gradients are ready: counts backward passes, and says when a bucket can travel.

A step of an optimizer goes through the phases of :class:`Phase`. Every bucket is sent exactly once a step, on every rank:
when its last gradient is ready, which is inside backward, or in ``step()`` at the latest. When the backward pass that sends
the last bucket ends, it waits for all of them, so the gradients are reduced when ``backward()`` returns.

A rank that waits there must have sent everything that other ranks may wait for in this pass. So it does not wait while any
optimizer of this process has begun a step, or is new, and has buckets left to send. Other ranks may have filled these in
the same pass, and wait for them, while this rank sends them only in a later pass or in ``step()``. Then ``step()`` or
``synchronize()`` waits.

What backward adds after ``step()`` to the gradients that the step has used stays on this rank: usually it comes of somebody
else's loss that flows through these parameters (the generator's, in a pair of adversaries) and is about to be thrown away.
A step begins with ``zero_grad()``, or with the first gradient that is not added to an old one.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from itertools import count
from typing import Any

import torch

from horovod.common.basics import is_initialized, size
from horovod.core.context import running
from horovod.core.handle import all_of
from horovod.torch.bucket_cutting import cut_buckets
from horovod.torch.buckets import Bucket, Slot
from horovod.torch.gradient_hooks import GradientHook
from horovod.torch.optimizer_arguments import Settings, check_parameter, check_passes
from horovod.torch.optimizer_identity import Identity
from horovod.torch.parameter_names import places

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
_INSIDE_NO_SYNC = "inside optimizer.no_sync() gradients are this rank's own; leave the block before {what}"

_everyone: weakref.WeakValueDictionary[int, Readiness] = weakref.WeakValueDictionary()
"""The optimizers of this process, in the order in which they were made."""
_count = count()


class Phase(Enum):
    """Where an optimizer is between two calls of ``step()``."""

    NEW = "no step has been made: the first gradient begins one"
    STEPPED = "gradients, if there are any, are those of the last step"
    FILLING = "a step has begun: backward fills buckets, and full ones are sent"
    REDUCED = "everything is reduced"
    SYNCHRONIZED = "everything is reduced, and the user has called synchronize()"


class Readiness(ABC):
    """The distributed part of one optimizer: its parameters, in buckets, and how far backward has come with each.

    Args:
        optimizer: the derived optimizer, complete but for this.

    Attributes:
        name: of the optimizer in requests; "" until its first step in a generation.
        passes: backward passes per step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, settings: Settings, identity: Identity) -> None:
        self._reference = weakref.ref(optimizer)  # who drops the optimizer is rid of both at once
        self.settings = settings
        self.identity = identity
        self.name = ""
        self.phase = Phase.NEW
        self._original: weakref.ref[torch.optim.Optimizer] | None = None
        self.passes = settings.passes
        self.names = dict(settings.names)
        self.slots: dict[torch.Tensor, Slot] = {}
        self.buckets: list[Bucket] = []
        self._frozen: list[torch.Tensor] = []
        self._parameters = 0
        self._paused = False
        self._generation = -1
        weakref.finalize(self, _let_go, self.slots, self.buckets).atexit = False
        self.adopt()
        _everyone[next(_count)] = self

    @abstractmethod
    def send(self, bucket: Bucket) -> None:
        """Start to reduce a bucket; sets its ``handle`` and ``sent``. What backward has not reached counts as zeros."""

    @abstractmethod
    def end_backward(self) -> None:
        """A backward pass ends, and no optimizer of this process holds anything back."""

    @abstractmethod
    def abandon(self) -> None:
        """Forget the step under way, whatever becomes of it."""

    @abstractmethod
    def before_scaler_steps(self) -> None:
        """A gradient scaler is about to step: it has unscaled the gradients, or does so next.

        Raises:
            AssertionError: they are not reduced.
        """

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that this is a part of."""
        optimizer = self._reference()
        assert optimizer is not None, "whoever asks was reached through the optimizer, or its hooks are gone"
        return optimizer

    @property
    def reduced(self) -> bool:
        """Whether the gradients are reduced, and no step has used them."""
        return self.phase in (Phase.REDUCED, Phase.SYNCHRONIZED)

    @property
    def under_way(self) -> bool:
        """Whether something is being reduced right now."""
        return any(bucket.handle is not None for bucket in self.buckets)

    def derived_from(self, original: torch.optim.Optimizer) -> None:
        """Remember the optimizer that the user wrapped, for schedulers that were made for it."""
        self._original = weakref.ref(original)

    def tell_schedulers(self) -> None:
        """Let a learning-rate scheduler of the original see that steps are made."""
        original: Any = self._original() if self._original is not None else None
        if original is not None:
            original._opt_called = True  # where PyTorch's schedulers look

    # Parameters

    def adopt(self) -> None:
        """Take care of parameters that are new, or frozen no longer. Every rank has the same ones at the same step."""
        optimizer = self.optimizer
        self._frozen.clear()
        self._parameters = _number_of_parameters(optimizer)
        for parameter, place in places(optimizer).items():
            name = self.names.setdefault(parameter, place)
            if parameter in self.slots:
                continue
            check_parameter(name, parameter, self.settings.op)
            if parameter.requires_grad:
                slot = self.slots[parameter] = Slot(parameter, name, self.passes)
                slot.sparse = isinstance(optimizer, torch.optim.SparseAdam)
            else:
                self._frozen.append(parameter)
        self._listen()

    def add_parameters(self) -> None:
        """The optimizer has got new ones, maybe in the middle of a step."""
        self.adopt()
        if self.phase is Phase.FILLING and is_initialized():
            self.prepare()

    def prepare(self) -> None:
        """Have buckets for the running generation and for all parameters there are now; cheap where nothing has changed.

        Raises:
            HorovodInternalError: no generation runs.
        """
        generation = running().generation
        if generation != self._generation:
            self._generation, self.name = generation, self.identity.name()
            for bucket in self.buckets:  # if one was under way, it has failed with its generation
                bucket.reset(self.passes)
                bucket.dissolve()
            self.buckets.clear()
        if any(p.requires_grad for p in self._frozen) or self._parameters != _number_of_parameters(self.optimizer):
            self.adopt()
        else:
            self._listen()
        self._cut()

    def communicates(self) -> bool:
        """Whether this rank reduces anything, now."""
        return (
            is_initialized() and bool(self.settings.process_set.included()) and (size() > 1 or running().config.elastic)
        )

    def _listen(self) -> None:
        """Hear of every gradient, on a rank that takes part."""
        if self.communicates():
            for slot in self.slots.values():
                if slot.hook is None:
                    slot.hook = GradientHook(slot, weakref.ref(self))
                else:
                    slot.hook.restore()

    def _cut(self) -> None:
        """Put parameters that are in no bucket into new ones."""
        new = [slot for slot in self.slots.values() if slot.bucket is None]
        if new and self.communicates():
            cut = cut_buckets(new, self.settings.groups if not self.buckets else None)
            self.buckets += [
                Bucket(f"{self.name}.{number}", members) for number, members in enumerate(cut, len(self.buckets))
            ]

    # A step's way

    def zero_grad(self) -> None:
        """The user throws the gradients away: a step begins.

        Raises:
            AssertionError: some gradients are complete, and may be on their way.
        """
        if is_initialized():
            self.prepare()
        if self.phase is Phase.FILLING and any(bucket.waiting != len(bucket.slots) for bucket in self.buckets):
            raise AssertionError(_ZERO_GRAD_TOO_EARLY)
        self.begin()
        for other in _everyone.values():
            if other.phase is Phase.NEW:  # the script begins steps with zero_grad(), and it has not begun that one's
                other.phase = Phase.STEPPED

    def begin(self) -> None:
        """A step begins, and no gradient is known."""
        self._reset()
        self.phase = Phase.FILLING

    def gradient_is_ready(self, slot: Slot, gradient: torch.Tensor) -> None:
        """A backward pass has added to a gradient.

        Raises:
            AssertionError: it had all its passes already.
        """
        before, slot.version = slot.version, gradient._version
        if self.phase is not Phase.FILLING and not self._begins_with(slot, before):
            return
        if slot.bucket is None:
            self.prepare()
        bucket = slot.bucket
        if bucket is None:
            return  # in this generation the rank takes no part
        if self._paused:
            if bucket.handle is not None:
                raise AssertionError(_TOO_MANY_PASSES.format(name=slot.name))
            return
        if slot.ready:
            raise AssertionError(_TOO_MANY_PASSES.format(name=slot.name))
        slot.passes -= 1
        if slot.passes:
            return
        slot.ready = True
        bucket.waiting -= 1
        if bucket.waiting or running().generation != self._generation:
            return
        self.send(bucket)
        if not any(each.open for each in self.buckets):
            torch.autograd.Variable._execution_engine.queue_callback(_end_of_backward)

    def _begins_with(self, slot: Slot, before: int | None) -> bool:
        """Whether a step begins with this gradient: it was not added to the one that the last reduction or step has left.

        Raises:
            AssertionError: it was, and that one has not been used yet.
        """
        added = before is None or slot.version == before + 1
        if self.phase is Phase.STEPPED:
            if added or torch.is_grad_enabled():  # with create_graph=True a sum is a new tensor, too
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
        """Whether backward may still fill a bucket of a step that has begun, or that may have for all this rank knows."""
        waiting: Iterable[Slot] = ()
        if self.phase is Phase.NEW:
            waiting = self.slots.values()
        elif self.phase is Phase.FILLING and self._generation == running().generation:
            waiting = (slot for bucket in self.buckets if bucket.open for slot in bucket.slots)
        return any(slot.parameter.requires_grad and slot.hook is not None and slot.hook.is_heard() for slot in waiting)

    def send_all(self) -> BaseException | None:
        """Send what has not been sent; the first error."""
        error: BaseException | None = None
        self.prepare()
        for bucket in self.buckets:
            if bucket.open:
                try:
                    self.send(bucket)
                except BaseException as failure:
                    error = error or failure
        return error

    def enter(self, phase: Phase) -> None:
        """Nothing is under way any more, and the gradients are those of ``phase``."""
        self._reset()
        self.phase = phase
        for bucket in self.buckets:
            bucket.reduced = self.reduced
        for slot in self.slots.values():
            slot.note_version()

    def forget(self) -> None:
        """Nothing is under way any more, and no gradient is known."""
        self._reset()
        self.phase = Phase.NEW

    def _reset(self) -> None:
        for bucket in self.buckets:
            bucket.reset(self.passes)

    def rewind(self) -> None:
        """Count passes anew for whatever has not been sent."""
        for bucket in self.buckets:
            if bucket.open:
                bucket.reset(self.passes)

    def set_passes(self, passes: int) -> None:
        self.passes = check_passes(passes)
        self.rewind()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block in which passes do not count."""
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
    optimizers = list(_everyone.values())
    if not any(optimizer.holds_back for optimizer in optimizers):
        all_of(optimizer.end_backward for optimizer in optimizers)


def _number_of_parameters(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _let_go(slots: dict[torch.Tensor, Slot], buckets: list[Bucket]) -> None:
    """Nobody holds the optimizer any more: neither listen to its parameters nor keep them alive."""
    for slot in slots.values():
        if slot.hook is not None:
            slot.hook.remove()
            slot.hook = None
    for bucket in buckets:
        bucket.dissolve()
