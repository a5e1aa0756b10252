"""Looks at the tensors of an optimizer in turn, for bindings that compare with :mod:`horovod.comparison.guard`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from horovod.comm.datatypes import Array
from horovod.comparison.looks import PERIOD, TENSORS, Part, place_of, tag_of, tensors_in_step
from horovod.comparison.precision import precision_of
from horovod.comparison.samples import Owner


class TensorPart(NamedTuple):
    """Some elements of a tensor.

    Attributes:
        name: the tensor's name.
        kind: the name of its elements' type, as in NumPy.
        values: returns the elements. It may be called when the tensor has changed, so it refers to a copy or to what stays.
    """

    name: str
    kind: str
    values: Callable[[], Array]


class LookedAt(NamedTuple):
    """An optimizer's parameters or gradients, of which some steps look at a few.

    Attributes:
        amount: how many there are, the same on all ranks.
        read: returns some elements of one of them, less than ``2 * looks.ELEMENTS``: given its number and a place, as for
            :func:`horovod.comparison.looks.part_of`. None: it is not compared here.
    """

    amount: int
    read: Callable[[int, int], TensorPart | None]


class Turn(NamedTuple):
    """What is looked at of one tensor in one step.

    Attributes:
        where: identifies it among the looks of an optimizer.
        place: as for :attr:`LookedAt.read`.
        part: the elements.
    """

    where: tuple[int, ...]
    place: int
    part: TensorPart


def turns(
    tensors: LookedAt, owner: Owner, step: int, most: int = TENSORS, times: int = 0, always: bool = False
) -> list[Turn]:
    """What a step looks at.

    Args:
        step: the number of the step.
        most: at how many tensors it looks at most.
        times: how often this step has looked before.
        always: look in this step in any case.
    """
    count = min(most, tensors.amount if always else tensors_in_step(step, owner.number, tensors.amount))
    found = []
    for turn in range(step // PERIOD * count, (step // PERIOD + 1) * count):
        number = turn % tensors.amount
        place = place_of(step, number)
        part = tensors.read(number, place)
        if part is not None and precision_of(part.kind) is not None:
            found.append(Turn((owner.number, step, times, number, tensors.amount), place, part))
    return found


def parts_of(seen: Sequence[Turn], parameters: bool) -> list[Part]:
    """The parts of tensors in the form that is compared.

    Args:
        parameters: whether the tensors are parameters; otherwise gradients.
    """
    found = []
    for where, place, part in seen:
        precision, values = precision_of(part.kind), part.values()
        if precision is not None and values.size:
            found.append(Part(tag_of(precision, parameters, *where, len(values)), part.name, values, place))
    return found
