"""Samples of gradients and parameters that the ranks compare while they train. A comparison may miss a difference, but a
difference that it tells is one.

Every few steps each rank looks at some tensors: a *look* is an element, a mean and a root mean square of a part of
one tensor. The next agreement of the ranks takes the looks along (:mod:`horovod.comparison.comparison`): for each number the
maximum of ``x`` and of ``-x`` over the ranks, as integers in the order of the numbers. So all ranks learn the largest and the
smallest value, and can allow for rounding. A rank that has no look, or has joined, sends what no maximum notices. A look has a
tag of everything that it depends on: if the ranks' tags differ, they have looked at different things, and nothing follows.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import itemgetter
from typing import NamedTuple

import msgspec
import numpy as np

from horovod.comm.datatypes import Array
from horovod.comparison.alike import complain, is_compared, views
from horovod.comparison.comparison import Comparison
from horovod.comparison.looks import (
    GRADIENTS,
    LEAST,
    TENSORS,
    Looks,
    apart,
    in_order,
    is_of_parameter,
    place_of,
    precision_in,
)
from horovod.core.lifecycle.context import running

LOOKS = TENSORS + GRADIENTS
"""How many looks go with one agreement."""
_NUMBERS = 4
"""The integers of a look: its tag, and its three values."""
_NOTHING = np.full((2, LOOKS, _NUMBERS), LEAST)
_NOTHING_SENT = _NOTHING.tobytes()
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
        told: the gradients have differed, so nothing more is said in this generation.
        told_parameters: the parameters have differed, or may: they are compared again after a broadcast.
        drift: how far apart parameters were at most, within the tolerance.
    """

    name: str
    number: int
    described: str
    told: bool = False
    told_parameters: bool = False
    drift: float = 0.0


class StepLooks(NamedTuple):
    """The looks of one step of an optimizer.

    Attributes:
        owner: the optimizer.
        step: the number of the step, from 1.
        tensors: the number of tensors of the optimizer.
        read: returns the looks; None if they are not there yet. Called at the agreement.
        late: whether they are read from a device: one step later, so that nobody waits for it.
    """

    owner: Owner
    step: int
    tensors: int
    read: Callable[[], Looks | None]
    late: bool = False


class _Different(msgspec.Struct, frozen=True, array_like=True):
    """A look in the gathered data, once it is known that ranks differ."""

    place: int
    owner: str
    described: str
    step: int
    label: str
    values: tuple[float, float, float]
    drift: float


class Difference(NamedTuple):
    """What the ranks have found to differ.

    Attributes:
        gradients: whether gradients differ; otherwise parameters do.
        distance: how far apart they are, relative to their size.
        held: what this rank has there, for the other ranks.
    """

    gradients: bool
    distance: float
    held: bytes


@dataclass(eq=False)
class Samples:
    """The looks of a process set's optimizers in one generation, or of one optimizer that compares by itself."""

    process_set_id: int
    _owners: dict[str, Owner] = field(default_factory=dict)
    _joins: int = 0
    _offers: dict[str, list[StepLooks]] = field(default_factory=dict)
    _sent: list[tuple[int, StepLooks, str, Array]] = field(default_factory=list)
    """By tag, what was sent last: the tag, what it belongs to, the label and the values."""

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
            number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
            self._owners[name] = Owner(name, number, described)
        return self._owners[name]

    def parameters_are_comparable(self, owner: Owner) -> bool:
        """Whether an optimizer's parameters must be the same on all ranks at present. After a join they are not, until a
        broadcast."""
        return not owner.told_parameters and running().joins == _joins_at_broadcast

    def offer(self, offer: StepLooks) -> None:
        """Compare an optimizer's looks with the next agreement. Older ones of it that wait are replaced."""
        waiting = self._offers.setdefault(offer.owner.name, [])
        waiting.append(offer)
        del waiting[: -2 if offer.late else -1]

    def drop(self, owner: str) -> None:
        """Forget the looks of an optimizer: its gradients or parameters are no longer those of a step."""
        self._offers.pop(owner, None)

    def begin_anew(self) -> None:
        """Forget all looks, since all parameters have been replaced, and compare them again."""
        self._offers.clear()
        for owner in self._owners.values():
            owner.told_parameters, owner.drift = owner.told, 0.0

    def taken(self) -> bytes:
        """The numbers that go with the next agreement, which every member makes that has not joined."""
        if self._joins != running().joins:  # before a join ends, ranks may have made different numbers of steps
            self._joins = running().joins
            self._offers.clear()
        sent = self._sent = self._chosen()
        if not sent:
            return _NOTHING_SENT
        message = _NOTHING.copy()
        own = message[0, : len(sent)]
        own[:, 0] = [tag for tag, *_ in sent]
        own[:, 1:] = in_order(np.array([values for *_, values in sent]))
        np.negative(own, out=message[1, : len(sent)])
        encoded: bytes = message.tobytes()
        return encoded

    def _chosen(self) -> list[tuple[int, StepLooks, str, Array]]:
        """The looks that are sent, by tag, so that all ranks have the same ones at the same place."""
        waiting = self._offers.values()
        due = [each.pop(0) for each in waiting if each and (len(each) > 1 or not each[0].late)]
        if len(due) > 1:  # if not all fit, some are drawn: by their numbers of tensors, and alike on all ranks
            due.sort(key=_turn)
        found: list[tuple[int, StepLooks, str, Array]] = []
        for offer in due:
            looks = offer.read()
            if looks is not None and len(found) + len(looks.tags) <= LOOKS:
                found += zip(looks.tags, repeat(offer), looks.labels, looks.values)
        return sorted(found, key=itemgetter(0))

    def judge(self, comparison: Comparison) -> None:
        """Judge the numbers that went with an agreement, and wait until all ranks have said what they hold. Every member that
        made it calls this.

        Raises:
            MismatchError: gradients or parameters differ, and ``HOROVOD_CHECK=error``. All of these members raise it.
        """
        difference = self.difference(comparison)
        if difference is not None:
            self.tell(difference, comparison.gathered(difference.held))

    def difference(self, comparison: Comparison) -> Difference | None:
        """What differs, from the numbers that went with an agreement. None on all ranks if nothing does."""
        found = comparison.numbers()
        if found is None:
            return None  # nobody has looked, or all ranks have the same bits
        largest, smallest = (each.reshape(LOOKS, _NUMBERS) for each in found)
        different: dict[int, float] = {}
        tags = largest[:, 0]
        compared = (tags != LEAST) & (tags == smallest[:, 0]) & (largest != smallest).any(1)
        for place in np.flatnonzero(compared).tolist():
            tag = int(tags[place])
            precision = precision_in(tag)
            distance = apart(largest[place, 1:], smallest[place, 1:], precision)
            if distance > precision.relative:
                different[place] = distance
            elif is_of_parameter(tag) and distance <= precision.rounding and place < len(self._sent):
                owner = self._sent[place][1].owner
                owner.drift = max(owner.drift, distance)
        if not different:
            return None
        gradients = {place for place in different if not is_of_parameter(int(tags[place]))}
        places = gradients or different.keys()
        own = [
            _Different(place, of.owner.name, of.owner.described, of.step, label, tuple(values.tolist()), of.owner.drift)
            for place, (_, of, label, values) in enumerate(self._sent)
            if place in places
        ]
        return Difference(bool(gradients), max(different.values()), msgspec.msgpack.encode(own))

    def tell(self, difference: Difference, held: Mapping[int, bytes]) -> None:
        """Say what differs. Every rank that has found the difference calls it.

        Args:
            held: by rank, :attr:`Difference.held`.

        Raises:
            MismatchError: ``HOROVOD_CHECK=error``.
        """
        rows = {rank: _DECODER.decode(row) for rank, row in held.items()}
        looks = [row for found in rows.values() for row in found]
        for name in {row.owner for row in looks}:
            self._mark(name, difference.gradients)
        drift = max((row.drift for row in looks), default=0.0)
        slow = not difference.gradients and difference.distance <= _SUDDEN * drift
        complain(_described(rows, difference.gradients, slow), list(rows), only_warn=slow)

    def _mark(self, name: str, gradients: bool) -> None:
        self.drop(name)
        if name in self._owners:
            self._owners[name].told |= gradients
            self._owners[name].told_parameters = True


def _turn(offer: StepLooks) -> float:
    chance = place_of(offer.step, offer.owner.number) % 65536 + 1
    return math.log(65536 / chance) / offer.tensors


_DECODER = msgspec.msgpack.Decoder(list[_Different])
_VALUES = ("an element of {label!r} is", "the mean of {label!r} is", "the root mean square of {label!r} is")


def _described(rows: Mapping[int, Sequence[_Different]], gradients: bool, slow: bool) -> str:
    """The message about looks that differ.

    Args:
        rows: by rank, its looks that differ from those of others.
    """
    by_place: dict[int, dict[int, _Different]] = {}
    for rank, looks in sorted(rows.items()):
        for each in looks:
            by_place.setdefault(each.place, {})[rank] = each
    shown = []
    for _, of_ranks in sorted(by_place.items()):
        number = max(range(3), key=lambda number: _spread([row.values[number] for row in of_ranks.values()]))
        first = next(iter(of_ranks.values()))
        texts = {rank: {"": f"{row.values[number]:.6g}"} for rank, row in of_ranks.items()}
        shown.append(f"{_VALUES[number].format(label=first.label)} {views('', texts)}")
    if len(shown) > _SHOWN:
        shown[_SHOWN:] = [f"and {len(shown) - _SHOWN} more"]
    row = next(row for looks in rows.values() for row in looks)
    found, cause = _GRADIENTS if gradients else _DRIFT if slow else _PARAMETERS
    return f"{found} in step {row.step} of {row.described}: {'; '.join(shown)}. {cause}"


def _spread(values: Sequence[float]) -> float:
    low, high = min(values), max(values)
    difference = high - low
    return math.inf if not math.isfinite(difference) else difference / (abs(high) + abs(low) or 1.0)


_GRADIENTS = (
    "The gradients of the ranks differ after they were reduced,",
    "Something has changed them on some ranks between the reduction and the step: a clip, noise or a division by what each "
    "rank has for itself, NaNs that one rank removes, or a rank's own gradient written over a reduced one. Change gradients "
    "alike on all ranks: allreduce the norm, the count or the seed first, and clip only parameters of the optimizer, after "
    "synchronize() if a rank may make no backward pass.",
)
_PARAMETERS = (
    "The parameters of the ranks have come apart",
    "Something has changed them, their reduced gradients or the optimizer's state, on some ranks: a checkpoint that only they "
    "have loaded, units that were reset, state that was cleared, or a change that depends on a rank's own loss. Make such "
    "changes on all ranks, or "
    "call hvd.broadcast_parameters and hvd.broadcast_optimizer_state after them. Parameters that each rank is to have for "
    "itself, such as experts, must not be averaged: register them as local, or give them a plain optimizer of their own.",
)
_DRIFT = (
    "The parameters of the ranks slowly drift apart, as seen",
    "Processors that round differently do this. Call hvd.broadcast_parameters from time to time, for example in each epoch.",
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
