"""An optimizer's parameters and their buckets.

Parameters may be added, replaced, frozen and unfrozen at any time, on every rank at the same step. Buckets belong to a
generation, whose first step cuts them. The cuts depend only on properties that are the same on all ranks.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count
from operator import attrgetter, is_, itemgetter

import torch

from horovod.core.lifecycle.context import is_initialized, running
from horovod.core.lifecycle.steps_made import StepCount
from horovod.torch.compression.bucket_compression import BucketCompressor
from horovod.torch.optimizer.bucket_cutting import by_size, cut_buckets
from horovod.torch.optimizer.buckets import Bucket, ParameterState
from horovod.torch.optimizer.gradient_hooks import GradientHook
from horovod.torch.optimizer.identity import OptimizerIdentity
from horovod.torch.optimizer.parameter_names import names_by_position
from horovod.torch.optimizer.settings import OptimizerSettings, check_parameter
from horovod.torch.uncompiled import uncompiled

_IMPLEMENTATION, _PARAMETERS = attrgetter("_cdata"), itemgetter("params")
_GONE = "only the optimizer and its hooks call this, and the hooks are removed with the optimizer"
_HISTORY = 8
"""After this number of passes that touch only a part of a bucket, the bucket is cut into the parts that passes touch."""
FROZEN_BYTES = 16 << 20
"""The size of a bucket of frozen parameters, in bytes. It is sent only when some are unfrozen."""


class ParameterObserver(ABC):
    """What learns of changes of an optimizer's parameters."""

    @abstractmethod
    def renumbered(self, moved: Callable[[int], int]) -> None:
        """Called when the bits of slots have changed. ``moved`` converts a set of slots from the old bits to the new ones."""

    @abstractmethod
    def new_generation(self) -> None:
        """Called at the first use in a new generation. The buckets of the earlier generation no longer exist."""


class GradientListener(ParameterObserver):
    """What the hooks of an optimizer's parameters call."""

    @abstractmethod
    def gradient_is_ready(self, slot: ParameterState, gradient: torch.Tensor | None) -> None:
        """Called when a backward pass has added to a gradient. ``gradient`` is None if a hook of the script has removed it."""

    def coming(self, slot: ParameterState) -> Callable[[torch.Tensor], None] | None:
        """A function to call before a backward pass adds to a gradient. It must not refer to the optimizer."""
        return None


class OptimizerParameters:
    """The parameters of one optimizer. None is known before :meth:`report_to`.

    Args:
        optimizer: the distributed optimizer.

    Attributes:
        settings: the settings of the optimizer.
        identity: the source of its name.
        name: the name of the optimizer in requests. "" until its first step in a generation.
        generation: the generation of the buckets. -1 until the first step.
        count: counts the steps in this generation, for the ranks' comparison at the end of the generation.
        names: the names of the parameters, by parameter.
        slots: by parameter, in the order of the optimizer. Parameters that cannot have a gradient, such as integers, have no
            slot.
        buckets: the buckets, in the order in which they were cut.
        trained: the set of slots whose parameters were not frozen when the buckets were cut.
        reduces: whether this rank reduces gradients in the generation of the buckets.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, settings: OptimizerSettings, identity: OptimizerIdentity
    ) -> None:
        self._reference = weakref.ref(optimizer)  # weak, so that deleting the optimizer frees all immediately
        self._listener: weakref.ref[GradientListener] | None = None
        self._observers: list[weakref.ref[ParameterObserver]] = []
        self.settings = settings
        self.identity = identity
        self.name = ""
        self.generation = -1
        self.count = StepCount()
        self.names = dict(settings.names)
        self.slots: dict[torch.Tensor, ParameterState] = {}
        self.buckets: list[Bucket] = []
        self.trained = 0
        self.reduces = False
        self._numbers = count()
        self._bucket_bytes = 0
        self._present: list[torch.Tensor] = []
        self._heard: list[int] = []  # the addresses of the C++ tensors that have their hooks
        self._changed = True
        weakref.finalize(self, _let_go, self.slots, self.buckets).atexit = False

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that this is a part of."""
        optimizer = self._reference()
        assert optimizer is not None, _GONE
        return optimizer

    def _in_groups(self) -> list[torch.Tensor]:
        """The parameters that the script has put into the optimizer's groups, in their order."""
        return [*chain.from_iterable(map(_PARAMETERS, self.optimizer.param_groups))]

    def report_to(self, listener: GradientListener, *observers: ParameterObserver) -> None:
        """Adopt the parameters that the optimizer has. From now on hooks call ``listener``, and all learn of changes."""
        self._listener = weakref.ref(listener)
        self._observers = [weakref.ref(each) for each in (listener, *observers)]
        self.adopt()

    def _observing(self) -> Iterator[ParameterObserver]:
        for each in self._observers:
            observer = each()
            assert observer is not None, "it has these parameters, so they end with it"
            yield observer

    def adopt(self) -> None:
        """Adopt parameters that are new, and drop those that are gone. They must be the same on every rank at the same step."""
        optimizer = self.optimizer
        self._present = self._in_groups()
        before = {slot: slot.bit for slot in self.slots.values()}
        kept: dict[torch.Tensor, ParameterState] = {}
        for parameter, name_by_position in names_by_position(optimizer).items():
            name = self.names.setdefault(parameter, name_by_position)
            slot = self.slots.get(parameter)
            if slot is None:
                check_parameter(name, parameter, self.settings.op)
                if not (parameter.is_floating_point() or parameter.is_complex()):
                    continue
                slot = ParameterState(parameter, name)
                slot.sparse = isinstance(optimizer, torch.optim.SparseAdam)
            kept[parameter] = slot
        for parameter, slot in self.slots.items():
            if parameter not in kept:
                self._drop(slot)
        self.slots.clear()  # the finalizer has this dictionary
        self.slots.update(kept)
        for position, slot in enumerate(kept.values()):
            slot.bit = 1 << position
        for bucket in self.buckets:
            bucket.renumber()
        for observer in self._observing():
            observer.renumbered(lambda mask: sum(slot.bit for slot, bit in before.items() if bit & mask and slot.bit))
        self._changed = True
        self.listen()

    def _drop(self, slot: ParameterState) -> None:
        """Drop a parameter that the optimizer no longer has. The other parameters of its bucket get new buckets."""
        if slot.hook is not None:
            slot.hook.remove()
            slot.hook = None
        if slot.bucket is not None:
            self.buckets.remove(slot.bucket)
            slot.bucket.dissolve()
        slot.bit = 0
        self.names.pop(slot.parameter, None)

    def prepare(self) -> None:
        """Make buckets for the running generation, unless they exist. Cheap if nothing has changed.

        Raises:
            HorovodInternalError: no generation runs.
        """
        generation = running().generation
        if generation != self.generation:
            self.generation, self.name = generation, self.identity.name()
            self.count = self._counted()
            for bucket in self.buckets:  # the reduction of a bucket has failed with its generation
                bucket.reset()
                bucket.dissolve()
            self.buckets.clear()
            self._numbers = count()
            self._bucket_bytes = 0
            for observer in self._observing():
                observer.new_generation()
            self._changed = True
        if self._changed:
            self._changed = False
            self.reduces = self.settings.active()
            self.listen()
            self._cut()

    def _counted(self) -> StepCount:
        if not self.settings.active():
            return StepCount()
        return running().steps.of(self.name, self.settings.process_set.ranks or (), self.settings.line)

    def adopt_changes(self) -> list[ParameterState]:
        """Adopt parameters that the script has put into a group or taken out of it. Returns the new ones."""
        present = self._in_groups()
        if len(present) == len(self._present) and all(map(is_, present, self._present)):
            return []
        known = {*self.slots.values()}
        self.adopt()
        return [slot for slot in self.slots.values() if slot not in known]

    def follow(self) -> list[ParameterState]:
        """Between two passes: :meth:`adopt_changes`, and restore hooks after ``module.to()`` has given parameters other C++
        tensors. Returns new parameters."""
        new = self.adopt_changes()
        implementations = [*map(_IMPLEMENTATION, self.slots)]
        if implementations != self._heard:
            for slot in self.slots.values():
                hook = slot.hook
                if hook is not None and hook.implementation != slot.parameter._cdata:
                    hook.restore()
            self._heard = implementations
        return new

    def communicates(self) -> bool:
        """Whether this rank reduces gradients at present; False before ``init()`` and after ``shutdown()``."""
        return is_initialized() and self.settings.active()

    def listen_again(self, lost: Iterable[ParameterState]) -> None:
        """Register the hooks of these slots again, which optimizers had taken that are gone."""
        for slot in lost:
            slot.hook = None
        self.listen()

    def look_again(self) -> None:
        """Let the next :meth:`prepare` register hooks and cut buckets that are missing."""
        self._changed = True

    def listen(self) -> None:
        """Register the hooks that are missing, if this rank reduces gradients."""
        self._heard = []
        reference = self._listener
        listener = reference() if reference is not None else None
        if reference is not None and listener is not None and self.communicates():
            for slot in self.slots.values():
                if slot.hook is None:
                    slot.hook = GradientHook(slot.parameter, _heard_by(reference, slot))
                coming = listener.coming(slot)
                if coming is not None:
                    slot.hook.precede(coming)

    def _cut(self) -> None:
        """Put parameters that are in no bucket into new buckets. Frozen parameters get separate buckets, so no other bucket
        waits for their gradients."""
        if not self.communicates():
            return
        new = [slot for slot in self.slots.values() if slot.bucket is None]
        trained = [slot for slot in new if slot.parameter.requires_grad]
        frozen = [slot for slot in new if not slot.parameter.requires_grad]
        groups = self.settings.groups if not self.buckets else None
        if trained:
            self._add_buckets(cut_buckets(trained, groups, self._bucket_bytes))
            if self._may_cut_anew():
                running().buckets_are_tuned = True
        if frozen:
            self._add_buckets(by_size(frozen, FROZEN_BYTES))
        self.trained = sum(slot.bit for slot in self.slots.values() if slot.parameter.requires_grad)

    def _may_cut_anew(self) -> bool:
        """Whether autotuning may choose the size of buckets: not if the user has chosen groups, a compressor keeps state, or
        the process set is not the global one."""
        chosen = self.settings.groups is not None or isinstance(self.settings.compression, BucketCompressor)
        return not chosen and self.settings.process_set.process_set_id == 0

    def cut_anew(self, bucket_bytes: int) -> None:
        """Cut buckets of another size. Called on all ranks between the same two rounds, when no bucket is being reduced.

        Args:
            bucket_bytes: the size in bytes. 0: the size that suits the running generation.
        """
        if bucket_bytes == self._bucket_bytes or not self._may_cut_anew():
            return
        self._bucket_bytes = bucket_bytes
        for bucket in self.buckets:
            bucket.dissolve()
        self.buckets.clear()
        self._cut()

    def cut_by_use(self, touched: int) -> None:
        """Cut buckets of which passes have repeatedly touched only parts, so that each part is sent as soon as it is ready.

        Args:
            touched: what the latest pass has touched on any rank.
        """
        for bucket in [*self.buckets] if self.settings.groups is None else ():
            reached = touched & bucket.mask
            if reached == bucket.mask:
                bucket.reached.clear()
            elif reached:
                bucket.reached.append(reached)
                if len(bucket.reached) == _HISTORY:
                    alike: dict[tuple[bool, ...], list[ParameterState]] = {}
                    for slot in bucket.slots:
                        alike.setdefault(tuple(bool(slot.bit & each) for each in bucket.reached), []).append(slot)
                    self.buckets.remove(bucket)
                    bucket.dissolve()
                    self._add_buckets([*alike.values()])

    def _add_buckets(self, cut: list[list[ParameterState]]) -> None:
        """Add a bucket for each list of slots, which are in no bucket."""
        for members in cut:
            bucket = Bucket(f"{self.name}.{next(self._numbers)}", members)
            for slot in members:
                slot.bucket = bucket
            self.buckets.append(bucket)


def _heard_by(listener: weakref.ref[GradientListener], slot: ParameterState) -> Callable[[torch.Tensor], None]:
    """The function that the hook of ``slot`` calls."""

    @uncompiled
    def heard(parameter: torch.Tensor) -> None:
        present = listener()
        if present is not None:
            present.gradient_is_ready(slot, parameter.grad)

    return heard


def _let_go(slots: dict[torch.Tensor, ParameterState], buckets: list[Bucket]) -> None:
    """Remove the hooks and release the parameters. Called when the optimizer is deleted."""
    for slot in slots.values():
        if slot.hook is not None:
            slot.hook.remove()
            slot.hook = None
    for bucket in buckets:
        bucket.dissolve()
