"""What a binding hands over: host memory with a type and a shape. The core never learns which framework owns it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from horovod.comm.datatypes import Array, DataType


class Tensor(NamedTuple):
    """One contiguous tensor in host memory.

    Attributes:
        array: its elements as a one-dimensional NumPy view of ``data_type.numpy``; the collective reads or writes it.
        data_type: of the elements.
        shape: as the framework has it; () for a scalar, which has one element.
    """

    array: Array
    data_type: DataType
    shape: tuple[int, ...]


Allocate = Callable[[int, int], Array]
"""``allocate(index, rows)``, on the lane's thread: make output ``index`` with that first dimension, return its flat view."""
