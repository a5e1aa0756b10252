"""How far apart the values of ranks may be that processors round differently, and elements that are compared so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum

import msgspec
import numpy as np

from horovod.comm.datatypes import Array

_LARGE = 2.0**500
"""The square of larger numbers may be infinite."""


class Precision(Enum):
    """How far apart the values of two ranks may be, for a type of elements.

    Attributes:
        number: its position among the members.
        relative: the tolerance, relative to the root mean square of the elements. It allows for norms and other sums that
            processors round differently, computed at least in single precision.
        rounding: what parameters that drift apart by rounding reach step by step.
        floor: numbers below it lose bits, or are 0 on some processors.
    """

    DOUBLE = (2.0**-11, 2.0**-26, 2.0**-120)
    SINGLE = (2.0**-11, 2.0**-11, 2.0**-110)
    HALF = (2.0**-5, 2.0**-5, 2.0**-20)
    """IEEE 754's half precision."""
    BRAIN = (2.0**-4, 2.0**-4, 2.0**-109)
    """bfloat16."""

    def __init__(self, relative: float, rounding: float, floor: float) -> None:
        self.number = len(type(self).__members__)
        self.relative, self.rounding, self.floor = relative, rounding, floor

    def apart(self, highest: Array, lowest: Array, size: float) -> float:
        """How far apart values are, relative to ``size``.

        Args:
            highest, lowest: of each value over the ranks, where NaN counts as the highest.
            size: the root mean square of the elements.
        """
        found = 0.0
        for high, low in zip(highest.tolist(), lowest.tolist(), strict=True):
            if high == low or (math.isnan(high) and math.isnan(low)):
                continue
            if not (math.isfinite(high) and math.isfinite(low)):
                if max(abs(each) for each in (high, low, 0.0) if math.isfinite(each)) > _LARGE:
                    continue  # on one rank the sum may have overflowed
                return math.inf
            if high - low > self.floor:
                found = max(found, (high - low) / size if size else math.inf)
        return found


_KINDS = {
    "float64": Precision.DOUBLE,
    "float32": Precision.SINGLE,
    "float16": Precision.HALF,
    "bfloat16": Precision.BRAIN,
}


def precision_of(kind: str) -> Precision | None:
    """The precision of a type of elements; None if such tensors are not compared with a tolerance.

    Args:
        kind: its name as in NumPy.
    """
    return _KINDS.get(kind)


class Elements(msgspec.Struct, frozen=True, array_like=True):
    """Some elements of a parameter, which ranks send to each other.

    Attributes:
        kind: the name of their type, as in NumPy.
        values: the elements.
        exact: whether the optimizers of this rank have not made a step yet, so that nothing has been rounded.
    """

    kind: str
    values: tuple[float, ...]
    exact: bool

    def __str__(self) -> str:
        return f"[{', '.join(map(repr, self.values))}]"


def differ(held: Sequence[str | Elements | None]) -> bool:
    """Whether what the ranks hold under one label differs. Elements differ by more than rounding once a rank has stepped."""
    elements = [each for each in held if isinstance(each, Elements)]
    if len(elements) < len(held):
        return len(set(held)) > 1
    if len({(each.kind, len(each.values)) for each in elements}) > 1:
        return True
    precision = precision_of(elements[0].kind)
    if precision is None or all(each.exact for each in elements):
        return len({repr(each.values) for each in elements}) > 1
    rows = np.array([each.values for each in elements])
    finite = np.where(np.isfinite(rows), rows, 0.0)
    with np.errstate(all="ignore"):
        size = float(np.sqrt(np.square(finite).sum(1) / max(1, rows.shape[1])).max())
        return precision.apart(rows.max(0), np.fmin.reduce(rows), size) > precision.relative
