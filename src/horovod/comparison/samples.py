"""Samples of gradients and parameters that the ranks compare while they train. A comparison may miss a difference, but every
difference that it reports is real.

Every few steps each rank looks at some tensors: a *look* is an element, a mean and a root mean square of a part of
one tensor. A digest of what it has seen goes with the next agreement of the ranks (:mod:`horovod.comparison.comparison`).
Usually all have seen the same bits. Otherwise the ranks gather their looks, and allow for rounding. A look has a tag of
everything that it depends on: only looks of one tag are compared. A rank that has none, or has joined, is left out.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from horovod.comparison.alike import complain, is_compared, views
from horovod.comparison.comparison import NOTHING, digest
from horovod.comparison.looks import GRADIENTS, TENSORS, Seen, apart, is_of_parameter, place_of, precision_in
from horovod.core.lifecycle.context import running

LOOKS = TENSORS + GRADIENTS
"""How many looks go with one agreement."""
_SUDDEN = 16
"""Parameters that have drifted apart by rounding drift further by less than this factor between two looks."""
_SHOWN = 3
"""How many tensors a message names."""


@dataclass
class Owner:
    """One optimizer, whose looks the ranks compare.

    Attributes:
        name: the same on all ranks.
        number: of the name, for tags.
        described: what messages call it.
        reported: the gradients have differed, so nothing more is said in this generation.
        parameters_reported: the parameters have differed, or may: they are compared again after a broadcast.
        drift: how far apart parameters were at most, within the tolerance.
    """

    name: str
    number: int
    described: str
    reported: bool = False
    parameters_reported: bool = False
    drift: float = 0.0


class StepLooks(NamedTuple):
    """The looks of one step of an optimizer.

    Attributes:
        owner: the optimizer.
        step: the number of the step, from 1.
        tensors: the number of tensors of the optimizer.
        read: returns what was seen; None if it is not there yet. Called at the agreement.
        late: whether it is read from a device: at the agreement after the next one, so that no rank waits for it.
    """

    owner: Owner
    step: int
    tensors: int
    read: Callable[[], Seen | None]
    late: bool = False


class _SeenByRank(msgspec.Struct, frozen=True, array_like=True):
    """What a rank has seen of one optimizer in one step, as ranks send it to each other.

    Attributes:
        owner, described, drift: as of :class:`Owner`.
        step: as of :class:`StepLooks`.
        tags, labels, values: as of :class:`~horovod.comparison.looks.Looks`.
    """

    owner: str
    described: str
    drift: float
    step: int
    tags: list[int]
    labels: list[str]
    values: list[tuple[float, float, float]]


class SentLooks(NamedTuple):
    """What a rank has seen until an agreement.

    Attributes:
        digest: goes with the agreement.
        seen: what the digest was made of.
    """

    digest: int = NOTHING
    seen: Sequence[tuple[StepLooks, Seen]] = ()

    def encode(self) -> bytes:
        """The looks, for the other ranks. Called if digests differ."""
        return msgspec.msgpack.encode([_row(of, seen) for of, seen in self.seen])


def _row(of: StepLooks, seen: Seen) -> _SeenByRank:
    tags, labels, values = seen.looks()
    owner = of.owner
    return _SeenByRank(owner.name, owner.described, owner.drift, of.step, [*tags], [*labels], values.tolist())


class _Look(NamedTuple):
    """A look of one rank, as it has sent it."""

    of: _SeenByRank
    label: str
    values: tuple[float, float, float]


@dataclass(eq=False)
class Samples:
    """The looks of a process set's optimizers in one generation, or of one optimizer that compares by itself.

    Attributes:
        offers: those that wait for the next agreement, by optimizer.
    """

    process_set_id: int
    offers: dict[str, list[StepLooks]] = field(default_factory=dict)
    _owners: dict[str, Owner] = field(default_factory=dict)
    _joins: int = 0

    def __post_init__(self) -> None:
        _enter_generation()
        _of_generation.add(self)

    def owner(self, name: str, described: str) -> Owner:
        """An optimizer.

        Args:
            name: the same on all ranks.
            described: what messages call it.
        """
        if name not in self._owners:
            self._owners[name] = Owner(name, number_of(name), described)
        return self._owners[name]

    def parameters_are_comparable(self, owner: Owner) -> bool:
        """Whether an optimizer's parameters must be the same on all ranks at present. After a join they are not, until a
        broadcast."""
        return not owner.parameters_reported and running().joins == _joins_at_broadcast

    def offer(self, offer: StepLooks) -> None:
        """Compare an optimizer's looks with the next agreement. Older ones of it that wait are replaced."""
        self._forget_before_join()
        waiting = self.offers.setdefault(offer.owner.name, [])
        waiting.append(offer)
        del waiting[: -2 if offer.late else -1]

    def drop(self, owner: str) -> None:
        """Forget the looks of an optimizer: its gradients or parameters are no longer those of a step."""
        self.offers.pop(owner, None)

    def begin_anew(self) -> None:
        """Forget all looks, since all parameters have been replaced, and compare them again."""
        self.offers.clear()
        for owner in self._owners.values():
            owner.parameters_reported, owner.drift = owner.reported, 0.0

    def taken(self) -> SentLooks:
        """What goes with the next agreement, which every member makes that has not joined. Without ``offers``, nothing."""
        self._forget_before_join()
        due = []
        for name, waiting in [*self.offers.items()]:
            if len(waiting) == 1 and waiting[0].late:
                waiting[0] = waiting[0]._replace(late=False)  # the next agreement takes it
                continue
            due.append(waiting.pop(0))
            if not waiting:
                del self.offers[name]
        if len(due) > 1:  # if not all fit, some are drawn: by their numbers of tensors, in the same way on all ranks
            due.sort(key=_turn)
        found: list[tuple[StepLooks, Seen]] = []
        amount = 0
        for offer in due:
            seen = offer.read()
            if seen is not None and amount + seen.amount <= LOOKS:
                found.append((offer, seen))
                amount += seen.amount
        return SentLooks(digest(b"".join([seen.content for _, seen in found])), found) if found else _NONE

    def _forget_before_join(self) -> None:
        """Forget the looks from before a join: until it ends, ranks may have made different numbers of steps."""
        joins = running().joins
        if self._joins != joins:
            self._joins = joins
            self.offers.clear()

    def judge(self, rows: Mapping[int, bytes]) -> None:
        """Judge what the ranks have seen until an agreement, because digests differ. All ranks of ``rows`` call it.

        Args:
            rows: by rank, what :meth:`SentLooks.encode` has returned there.

        Raises:
            MismatchError: gradients or parameters differ, and ``HOROVOD_CHECK=error``.
        """
        looks: dict[int, dict[int, _Look]] = {}
        for rank, row in sorted(rows.items()):
            for of in _DECODER.decode(row):
                for tag, label, values in zip(of.tags, of.labels, of.values, strict=True):
                    looks.setdefault(tag, {})[rank] = _Look(of, label, values)
        different: dict[int, float] = {}
        for tag, of_ranks in looks.items():
            precision = precision_in(tag)
            distance = apart(np.array([each.values for each in of_ranks.values()]), precision)
            if distance > precision.relative:
                different[tag] = distance
            elif is_of_parameter(tag) and distance <= precision.rounding:
                owner = self._owners.get(next(iter(of_ranks.values())).of.owner)
                if owner is not None:
                    owner.drift = max(owner.drift, distance)
        if different:
            gradients = {tag for tag in different if not is_of_parameter(tag)}
            found = [looks[tag] for tag in sorted(gradients or different)]
            self._tell(found, bool(gradients), max(different.values()), list(rows))

    def _tell(
        self, found: Sequence[Mapping[int, _Look]], gradients: bool, distance: float, ranks: Sequence[int]
    ) -> None:
        """Say what differs.

        Args:
            found: looks that differ, by rank.
            gradients: whether they are at gradients; otherwise at parameters.
            distance: how far apart they are, relative to the size of the elements.
            ranks: those that took part.
        """
        rows = [look.of for of_ranks in found for look in of_ranks.values()]
        for name in {row.owner for row in rows}:
            self._mark(name, gradients)
        slow = not gradients and distance <= _SUDDEN * max(row.drift for row in rows)
        complain(_described(found, gradients, slow), ranks, only_warn=slow)

    def _mark(self, name: str, gradients: bool) -> None:
        self.drop(name)
        if name in self._owners:
            self._owners[name].reported |= gradients
            self._owners[name].parameters_reported = True


_NONE = SentLooks()
_DECODER = msgspec.msgpack.Decoder(list[_SeenByRank])
_VALUES = ("an element of {label!r} is", "the mean of {label!r} is", "the root mean square of {label!r} is")


def number_of(name: str) -> int:
    """The number of an optimizer with this name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")


def _turn(offer: StepLooks) -> float:
    chance = place_of(offer.step, offer.owner.number) % 65536 + 1
    return math.log(65536 / chance) / offer.tensors


def _described(found: Sequence[Mapping[int, _Look]], gradients: bool, slow: bool) -> str:
    """The message about looks that differ, each by rank."""
    shown = []
    for of_ranks in found[:_SHOWN]:
        number = max(range(3), key=lambda number: _spread([look.values[number] for look in of_ranks.values()]))
        label = next(iter(of_ranks.values())).label
        texts = {rank: {"": f"{look.values[number]:.6g}"} for rank, look in of_ranks.items()}
        shown.append(f"{_VALUES[number].format(label=label)} {views('', texts)}")
    if len(found) > _SHOWN:
        shown.append(f"and {len(found) - _SHOWN} more")
    row = next(iter(found[0].values())).of
    what, cause = _GRADIENTS if gradients else _DRIFT if slow else _PARAMETERS
    return f"{what} in step {row.step} of {row.described}: {'; '.join(shown)}. {cause}"


def _spread(values: Sequence[float]) -> float:
    low, high = min(values), max(values)
    difference = high - low
    return math.inf if not math.isfinite(difference) else difference / (abs(high) + abs(low) or 1.0)


_GRADIENTS = (
    "The gradients of the ranks differ after they were reduced,",
    "Something has changed them on some ranks between the reduction and the step: clipping, noise or a division by a value of "
    "each rank's own, NaNs that one rank removes, or a rank's own gradient written over a reduced one. Change gradients in "
    "the same way on all ranks: allreduce the norm, the count or the seed first, and clip only parameters of the optimizer, "
    "after synchronize() if a rank may make no backward pass.",
)
_PARAMETERS = (
    "The parameters of the ranks have diverged",
    "Something has changed them, their reduced gradients or the optimizer's state, on some ranks: a checkpoint that only they "
    "have loaded, units that were reset, state that was cleared, or a change that depends on a rank's own loss. Make such "
    "changes on all ranks, or call hvd.broadcast_parameters and hvd.broadcast_optimizer_state after them. Parameters that each "
    "rank should have for itself, such as experts, must not be averaged: register them as local, or give them a plain "
    "optimizer of their own.",
)
_DRIFT = (
    "The parameters of the ranks slowly diverge, as seen",
    "Processors that round differently cause this. Call hvd.broadcast_parameters from time to time, for example in each epoch.",
)


_of_sets: dict[int, Samples] = {}
_of_generation: weakref.WeakSet[Samples] = weakref.WeakSet()
_generation = -1
_joins_at_broadcast = 0
"""How often all ranks had joined when parameters were last broadcast in this generation."""


def _enter_generation() -> None:
    global _generation, _joins_at_broadcast
    generation = running().generation
    if generation != _generation:
        _of_sets.clear()
        _of_generation.clear()
        _generation, _joins_at_broadcast = generation, 0


def samples_of(process_set_id: int | None) -> Samples | None:
    """The looks of a process set in the running generation; None if nothing is compared. The same on all ranks."""
    if process_set_id is None or not is_compared():
        return None
    if running().generation != _generation:
        _enter_generation()
    found = _of_sets.get(process_set_id)
    if found is None:
        found = _of_sets[process_set_id] = Samples(process_set_id)
    return found


def parameters_are_replaced() -> None:
    """Note that all ranks have the parameters or the state of one rank now, by a broadcast."""
    global _joins_at_broadcast
    _enter_generation()
    _joins_at_broadcast = running().joins
    for samples in _of_generation:
        samples.begin_anew()
