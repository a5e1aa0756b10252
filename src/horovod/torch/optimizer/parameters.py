"""An optimizer's parameters and their buckets.

Parameters may be added, frozen and unfrozen at any time. Buckets belong to a generation. Its first step cuts them by properties
that are the same on all ranks.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from horovod.common.basics import is_initialized
from horovod.core.lifecycle.context import running
from horovod.torch.optimizer.bucket_cutting import cut_buckets
from horovod.torch.optimizer.buckets import Bucket, Slot
from horovod.torch.optimizer.gradient_hooks import GradientHook
from horovod.torch.optimizer.identity import Identity
from horovod.torch.optimizer.parameter_names import places
from horovod.torch.optimizer.settings import Settings, check_parameter


class OptimizerParameters(ABC):
    """The parameters of one optimizer.

    Args:
        optimizer: the distributed optimizer, before it has its distributed part.

    Attributes:
        name: the name of the optimizer in requests. "" until its first step in a generation.
        generation: the generation of the buckets. -1 until then.
        passes: the number of backward passes per step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, settings: Settings, identity: Identity) -> None:
        self._reference = weakref.ref(optimizer)  # weak, so that deleting the optimizer frees both immediately
        self.settings = settings
        self.identity = identity
        self.name = ""
        self.generation = -1
        self.passes = settings.passes
        self.names = dict(settings.names)
        self.slots: dict[torch.Tensor, Slot] = {}
        self.buckets: list[Bucket] = []
        self._frozen: list[torch.Tensor] = []
        self._parameters = 0
        self._changed = True
        weakref.finalize(self, _let_go, self.slots, self.buckets).atexit = False
        self.adopt()

    @abstractmethod
    def gradient_is_ready(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Called when a backward pass has added to a gradient."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that this is a part of."""
        optimizer = self._reference()
        assert optimizer is not None, (
            "only the optimizer and its hooks call this, and the hooks are removed with the optimizer"
        )
        return optimizer

    def adopt(self) -> None:
        """Adopt parameters that are new or no longer frozen. They must be the same on every rank at the same step."""
        optimizer = self.optimizer
        self._frozen.clear()
        self._parameters = _number_of_parameters(optimizer)
        for parameter, place in places(optimizer).items():
            name = self.names.setdefault(parameter, place)
            if parameter in self.slots:
                continue
            check_parameter(name, parameter, self.settings.op)
            if parameter.requires_grad:
                slot = self.slots[parameter] = Slot(parameter, name)
                slot.sparse = isinstance(optimizer, torch.optim.SparseAdam)
            else:
                self._frozen.append(parameter)
        self._changed = True
        self._listen()

    def prepare(self) -> None:
        """Have buckets for the running generation and for all parameters there are now; cheap where nothing has changed.

        Raises:
            HorovodInternalError: no generation runs.
        """
        generation = running().generation
        if generation != self.generation:
            self.generation, self.name = generation, self.identity.name()
            for bucket in self.buckets:  # if one was under way, it has failed with its generation
                bucket.reset(self.passes)
                bucket.dissolve()
            self.buckets.clear()
            self._changed = True
        if any(p.requires_grad for p in self._frozen) or self._parameters != _number_of_parameters(self.optimizer):
            self.adopt()
        if self._changed:
            self._changed = False
            self._listen()
            self._cut()

    def communicates(self) -> bool:
        """Whether this rank reduces gradients at present; False before ``init()`` and after ``shutdown()``."""
        return is_initialized() and self.settings.active()

    def _listen(self) -> None:
        """Register a hook with every parameter, if this rank reduces gradients."""
        if self.communicates():
            for slot in self.slots.values():
                if slot.hook is None:
                    slot.hook = GradientHook(slot.parameter, _heard(weakref.ref(self), slot))

    def _cut(self) -> None:
        """Put parameters that are in no bucket into new ones."""
        new = [slot for slot in self.slots.values() if slot.bucket is None]
        if new and self.communicates():
            cut = cut_buckets(new, self.settings.groups if not self.buckets else None)
            for number, members in enumerate(cut, len(self.buckets)):
                self.buckets.append(Bucket(f"{self.name}.{number}", members, self.passes))


def _number_of_parameters(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _heard(optimizer: weakref.ref[OptimizerParameters], slot: Slot) -> Callable[[torch.Tensor], None]:
    """The function that the hook of ``slot`` calls."""

    def heard(parameter: torch.Tensor) -> None:
        present = optimizer()
        if present is not None:
            present.gradient_is_ready(slot, parameter.grad)  # type: ignore[arg-type]  # backward has just set it

    return heard


def _let_go(slots: dict[torch.Tensor, Slot], buckets: list[Bucket]) -> None:
    """Remove the hooks and release the parameters. Called when the optimizer is deleted."""
    for slot in slots.values():
        if slot.hook is not None:
            slot.hook.remove()
            slot.hook = None
    for bucket in buckets:
        bucket.dissolve()
