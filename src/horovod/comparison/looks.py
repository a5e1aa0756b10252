"""One look at a tensor: some elements of a part of it, its place, and values of it that the ranks can compare.

Looks are computed only if ranks have seen different bits, and all of a step at once: a call of NumPy costs more than what it
computes here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec
import numpy as np

from horovod.comm.datatypes import Array
from horovod.comparison.precision import Precision

PERIOD = 8
"""An optimizer looks in one of so many steps."""
TENSORS, GRADIENTS = 20, 6
"""At how many parameters a step looks at most, and at how many of their gradients."""
ELEMENTS = 512
"""About how many elements of a tensor one look reads."""
_WITHIN = 48
"""Of a model with few tensors, each is looked at within so many steps."""
_PRECISIONS = list(Precision)
_SMALL_BITS = 4  # of a tag: the precision, and whether it is of a parameter
_LARGE_BITS = (1 << 62) - 1 >> _SMALL_BITS << _SMALL_BITS


class Part(msgspec.Struct, gc=False):
    """The part of a tensor that one look reads.

    Attributes:
        tag: from :func:`tag_of`.
        label: the name of the tensor.
        values: less than ``2 * ELEMENTS`` numbers of any type, at least one.
        place: chooses the element that is compared by itself.
    """

    tag: int
    label: str
    values: Array
    place: int


class Looks(NamedTuple):
    """What a rank sees of some tensors.

    Attributes:
        tags, labels: of each tensor, as for :class:`Part`.
        values: of each tensor an element, the mean and the root mean square of its part, as float64.
    """

    tags: Sequence[int]
    labels: Sequence[str]
    values: Array


class Seen(NamedTuple):
    """What a rank has seen of some tensors in a step.

    Attributes:
        amount: how many looks it has made.
        content: bytes that are the same on ranks that have seen the same bits.
        looks: computes the looks.
    """

    amount: int
    content: bytes
    looks: Callable[[], Looks]


def tag_of(precision: Precision, parameter: bool, *where: int) -> int:
    """The tag of a look: the same on two ranks exactly if they look at the same place of the same tensor in the same step.

    Args:
        parameter: whether it is of a parameter; otherwise of a gradient.
        where: numbers of the optimizer, its step, the tensor, its layout and the place.
    """
    # Hashes of integers are the same in all processes.
    return hash(where) & _LARGE_BITS | precision.number << 1 | parameter


def precision_in(tag: int) -> Precision:
    """The precision that a tag was made with."""
    return _PRECISIONS[tag >> 1 & (1 << _SMALL_BITS - 1) - 1]


def is_of_parameter(tag: int) -> bool:
    """Whether a tag is of a parameter; otherwise it is of a gradient."""
    return bool(tag & 1)


def looks_in(step: int, optimizer: int) -> bool:
    """Whether an optimizer looks at tensors in a step.

    Args:
        optimizer: the number of the optimizer; others look in other steps.
    """
    return not (step + optimizer) % PERIOD


def tensors_in_step(step: int, optimizer: int, tensors: int) -> int:
    """At how many tensors a step looks. So each has its turn within 48 steps, or half as many steps as there are tensors.

    Args:
        step: the number of the step.
        optimizer: the number of the optimizer.
        tensors: how many it has.
    """
    return min(TENSORS, -(-tensors * PERIOD // _WITHIN)) if looks_in(step, optimizer) else 0


def part_of(count: int, place: int) -> tuple[int, int]:
    """The first element, and the distance of elements, that a look at ``place`` reads of a tensor of ``count`` elements."""
    apart = count // ELEMENTS or 1
    return place % apart, apart


def looks_at(parts: Sequence[Part]) -> Looks:
    """The looks at parts of one or more tensors."""
    counts = [len(each.values) for each in parts]
    starts = [*accumulate(counts[:-1], initial=0)]
    with np.errstate(all="ignore"):
        # float64, so that no square is too large or too small
        joined = np.concatenate([each.values for each in parts], dtype=np.float64)
        values = np.empty((len(parts), 3))
        chosen = [each.place % count for each, count in zip(parts, counts, strict=True)]
        values[:, 0] = joined[np.add(starts, chosen)]
        values[:, 1] = np.add.reduceat(joined, starts) / counts
        values[:, 2] = np.sqrt(np.add.reduceat(joined * joined, starts) / counts)
    return Looks([each.tag for each in parts], [each.label for each in parts], values)


def place_of(step: int, number: int) -> int:
    """A number that differs from step to step and from tensor to tensor, and is the same on all ranks."""
    return ((step + 1) * 0x9E3779B97F4A7C15 + (number + 1) * 0xC2B2AE3D27D4EB4F) % (1 << 64) >> 20


def apart(values: Array, precision: Precision) -> float:
    """How far apart the ranks' values of a look are, relative to the size of the elements.

    Args:
        values: of shape [ranks, 3].
    """
    if (values == values[0]).all():
        return 0.0
    with np.errstate(all="ignore"):
        highest, lowest = values.max(0), np.fmin.reduce(values)  # NaN counts as the highest
    return precision.apart(highest, lowest, abs(float(highest[2])))
