"""Converts numbers that scripts keep in a framework's variables, and plain ones (:mod:`horovod.core.submission.arguments`)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from horovod.core.submission.arguments import real_number, whole_number


def whole(value: Any, what: str) -> int:
    """A whole number, also one in a variable. Raises as :func:`horovod.core.submission.arguments.whole_number`."""
    return value if type(value) is int else whole_number(_content(value), what)


def real(value: Any, what: str) -> float:
    """A finite number, also one in a variable. Raises as :func:`horovod.core.submission.arguments.real_number`."""
    if type(value) is float and math.isfinite(value):
        return value
    return real_number(_content(value), what)


def positive_whole(value: Any, what: str) -> int:
    """A whole number above 0, also one in a variable. Raises ValueError for others."""
    number = whole(value, what)
    if number <= 0:
        raise ValueError(f"{what} must be > 0, not {number}")
    return number


def whole_if_number(value: Any) -> Any:
    """A NumPy integer, or a tensor or variable that holds a whole number, as an int; anything else as it is."""
    try:
        return whole(value, "the number")
    except TypeError:
        return value


def _content(value: Any) -> Any:
    """The value of a variable or a tensor, as a NumPy value; anything else, and a variable in a graph, unchanged."""
    read = getattr(value, "numpy", None)
    if isinstance(value, np.generic | np.ndarray) or not callable(read):
        return value
    try:
        return read()
    except Exception:  # a variable in a graph that is being built
        return value
