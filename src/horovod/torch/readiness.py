"""Which of an optimizer's gradients are ready: counts backward passes, and says when a bucket can travel.

A bucket is *sent* when its last gradient is ready, which is inside backward, or at the end of the step at the latest. It is
sent during backward only in a step that has *begun*: after the optimizer was made, after ``zero_grad()``, or when gradients
that an earlier step left behind have been thrown away. What backward adds between a step and the next ``zero_grad()`` stays
where it is: usually it comes of somebody else's loss that flows through these parameters (the generator's, in a pair of
adversaries) and is about to be thrown away; if it is not, it is sent at the end of the step.

That decides when something is sent, and nothing else: every bucket is sent exactly once a step, on every rank.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from horovod.common.basics import size
from horovod.core.context import running
from horovod.torch.bucket_cutting import bucket_bytes, by_groups, by_size, identity
from horovod.torch.buckets import Bucket, Slot
from horovod.torch.optimizer_arguments import Settings, check_passes
from horovod.torch.parameter_names import places

_TOO_MANY_PASSES = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally, or run all passes but the last inside "
    "optimizer.no_sync(). The parameter is {name!r}."
)
_ZERO_GRAD_TOO_EARLY = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
    "This would clear gradients that are being reduced."
)
_INSIDE_NO_SYNC = "inside optimizer.no_sync() gradients are this rank's own; leave the block before {what}"

_unused: weakref.WeakSet[Readiness] = weakref.WeakSet()
"""Optimizers whose first step nobody has begun with ``zero_grad()``."""

_listening: Any = WeakIdKeyDictionary()
"""By parameter, the hook of the optimizer that was made for it last."""


class Readiness(ABC):
    """The distributed part of one optimizer: its parameters, in buckets, and how far backward has come with each.

    Args:
        optimizer: the derived optimizer, complete but for this.

    Attributes:
        name: of the optimizer in requests; "" while it has no parameter to reduce.
        passes: backward passes per step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, settings: Settings) -> None:
        self._reference = weakref.ref(optimizer)  # who drops the optimizer is rid of both at once
        self.settings = settings
        self.name = ""
        self._original: weakref.ref[torch.optim.Optimizer] | None = None
        self.passes = settings.passes
        self.names = dict(settings.names)
        self.slots: dict[torch.Tensor, Slot] = {}
        self.buckets: list[Bucket] = []
        self._frozen: list[torch.Tensor] = []
        self._parameters = 0
        self._begun = True
        self._paused = False
        self._watched: list[torch.Tensor] = []
        self._communicates = settings.process_set.included() and (size() > 1 or running().config.elastic)
        self._hooks: list[Any] = []
        weakref.finalize(self, _let_go, self._hooks, self.buckets).atexit = False
        _unused.add(self)
        self.adopt()

    @abstractmethod
    def send(self, bucket: Bucket) -> None:
        """Start to reduce a bucket; sets its ``handle``. What backward has not reached counts as zeros."""

    @abstractmethod
    def abandon(self) -> None:
        """Forget the step under way, whatever becomes of it."""

    @abstractmethod
    def before_unscaling(self) -> None:
        """A gradient scaler is about to change the gradients."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that this is a part of."""
        optimizer = self._reference()
        assert optimizer is not None, "whoever asks was reached through the optimizer, or its hooks are gone"
        return optimizer

    @property
    def under_way(self) -> bool:
        """Whether something is being reduced right now."""
        return any(bucket.handle is not None for bucket in self.buckets)

    def derived_from(self, original: torch.optim.Optimizer) -> None:
        """Remember the optimizer that the user wrapped, for schedulers that were made for it."""
        self._original = weakref.ref(original)

    def mark_stepped(self) -> None:
        """Let a learning-rate scheduler of the original see that steps are made."""
        original: Any = self._original() if self._original is not None else None
        if original is not None:
            original._opt_called = True  # where PyTorch's schedulers look

    # Parameters

    def adopt(self) -> None:
        """Take care of parameters that are new, or frozen no longer. Every rank has the same ones at the same step."""
        optimizer = self.optimizer
        new: list[Slot] = []
        self._frozen.clear()
        self._parameters = _count(optimizer)
        for parameter, place in places(optimizer).items():
            name = self.names.setdefault(parameter, place)
            if parameter in self.slots:
                continue
            if parameter.requires_grad:
                slot = self.slots[parameter] = Slot(parameter, name, self.passes)
                slot.sparse = isinstance(optimizer, torch.optim.SparseAdam)
                new.append(slot)
            else:
                self._frozen.append(parameter)
        if not new or not self._communicates:
            return
        groups = self.settings.groups if not self.buckets else None
        cut = by_groups(new, groups) if groups is not None else by_size(new, bucket_bytes(s.parameter for s in new))
        self.name = self.name or identity(new)
        self.buckets += [
            Bucket(f"{self.name}.{number}", members) for number, members in enumerate(cut, len(self.buckets))
        ]
        self._hooks += _listen(self, new)

    def adopt_if_changed(self) -> None:
        """:meth:`adopt`, cheap where nothing has changed."""
        if any(p.requires_grad for p in self._frozen) or self._parameters != _count(self.optimizer):
            self.adopt()

    # A step's way

    def begin(self) -> None:
        """``zero_grad()``: what has been accumulated does not count.

        Raises:
            AssertionError: some gradients are complete, and may be on their way.
        """
        if any(bucket.waiting != len(bucket.slots) for bucket in self.buckets):
            raise AssertionError(_ZERO_GRAD_TOO_EARLY)
        if _unused:
            _unused.discard(self)
            for other in _unused:  # the script begins steps with zero_grad(), and it has not begun theirs
                other._begun = False
            _unused.clear()
        self.adopt_if_changed()
        if self.passes > 1:
            self.rewind()
        self._begun = True

    def gradient_is_ready(self, slot: Slot) -> None:
        """A backward pass has added to a gradient.

        Raises:
            AssertionError: it had all its passes already.
        """
        if not self._begun and not self._begins_now():
            return
        if self._paused:
            if slot.bucket.handle is not None:
                raise AssertionError(_TOO_MANY_PASSES.format(name=slot.name))
            return
        if slot.ready:
            raise AssertionError(_TOO_MANY_PASSES.format(name=slot.name))
        slot.passes -= 1
        if slot.passes:
            return
        slot.ready = True
        bucket = slot.bucket
        bucket.waiting -= 1
        if not bucket.waiting:
            self.send(bucket)

    @property
    def thrown_away(self) -> bool:
        """Whether somebody has removed the gradients that the last step left."""
        return any(p.grad is None and p.requires_grad for p in self._watched)

    def _begins_now(self) -> bool:
        """Between two steps: whether a gradient belongs to the next one."""
        self._begun = self.thrown_away
        return self._begun

    def send_all(self) -> BaseException | None:
        """Send what has not been sent; the first error."""
        error: BaseException | None = None
        self.adopt_if_changed()
        for bucket in self.buckets:
            if bucket.handle is None:
                try:
                    self.send(bucket)
                except BaseException as failure:
                    error = error or failure
        return error

    def end(self) -> None:
        """Everything has been reduced."""
        for bucket in self.buckets:
            bucket.reset(self.passes)
        self._begun = False
        if self.buckets:  # the first and the last that backward reaches, so one of them is still to come in any hook
            self._watched = [self.buckets[0].slots[0].parameter, self.buckets[-1].slots[-1].parameter]

    def rewind(self) -> None:
        """Count passes anew for whatever has not been sent."""
        for bucket in self.buckets:
            if bucket.handle is None:
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


def _count(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _listen(readiness: Readiness, slots: Iterable[Slot]) -> list[Any]:
    """Hooks by which ``readiness`` hears of every gradient; they do not keep it alive.

    Of several optimizers over one parameter, the one made last hears of it; the others send it at the end of their steps.
    """
    reference = weakref.ref(readiness)
    hooks: list[Any] = []
    for slot in slots:
        parameter: Any = slot.parameter  # PyTorch leaves this method untyped
        if parameter in _listening:
            _listening[parameter].remove()
        hook = parameter.register_post_accumulate_grad_hook(_hook(reference, slot))
        _listening[parameter] = hook
        hooks.append(hook)
    return hooks


def _hook(reference: Callable[[], Readiness | None], slot: Slot) -> Callable[[torch.Tensor], None]:
    def gradient_is_ready(_: torch.Tensor) -> None:
        readiness = reference()
        if readiness is not None:
            readiness.gradient_is_ready(slot)

    return gradient_is_ready


def _let_go(hooks: Iterable[Any], buckets: Iterable[Bucket]) -> None:
    """Nobody holds the optimizer any more: neither listen to its parameters nor keep them alive."""
    for hook in hooks:
        hook.remove()
    for bucket in buckets:
        bucket.dissolve()
