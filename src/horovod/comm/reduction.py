r"""Reduces and scales elements in host memory, for all engines for host memory. So their results have the same bits, except
those of ``hierarchical``, which adds host by host. (``nccl`` reduces on the device; :mod:`horovod.comm.adasum` combines
vectors.)

The contributions to an element are the leaves, in rank order, of a complete binary tree: all levels are full, except the last
one, which is filled from the left::

    0   1   2    3   4        five ranks: ((0 + 1) + 2) + (3 + 4)
     \ /    |     \ /
      01    2      34
        \  /      /
         012     /
           \    /
           01234

So who computes which node changes no bit: one rank all of them (``reduce_into``), or each rank those between its leaf and the
root (:mod:`horovod.comm.exchange.tree_reduction`). 16-bit floats are widened to float32, combined, scaled and rounded once. A
loaded framework may provide faster kernels (:func:`use_halves`). These round to nearest-even as well, so results do not depend
on which kernels are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from horovod.comm.datatypes import COMPLEX, FLOATING, HALF_PRECISION, Array, DataType


class ReduceOp(IntEnum):
    """Reductions, with the integer values of the public interface. The bitwise ones, which that interface lacks, follow."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5
    BAND = 6
    BOR = 7
    BXOR = 8

    @property
    def label(self) -> str:
        """The name users write, for example ``Average``."""
        return self.name.capitalize()


_FOLD: dict[ReduceOp, Any] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}


def without_average(op: ReduceOp, prescale: float, postscale: float, size: int) -> tuple[ReduceOp, float, float]:
    """An engine's operation and factors for a reduction over ``size`` ranks: Average is a Sum whose postscale is divided by
    it."""
    if op == ReduceOp.AVERAGE:
        return ReduceOp.SUM, prescale, postscale / size
    return op, prescale, postscale


OF_BITS = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})
"""The reductions of integers and bools bit by bit."""

Convert = Callable[[Array, Array], None]
"""``convert(source, target)`` casts every element of ``source`` into ``target``, rounding to nearest-even."""


def _cast(source: Array, target: Array) -> None:
    np.copyto(target, source, casting="unsafe")


Combine = Callable[[Array, Array, Array], bool]
"""``combine(first, second, target)`` combines 16-bit floats with a single rounding. It returns False if it cannot; then the
contents of ``target`` are arbitrary."""


def _not_done(first: Array, second: Array, target: Array) -> bool:
    return False


_widen: Convert = _cast
_narrow: Convert = _cast
_sum: Combine = _not_done
_mean: Combine = _not_done


def use_halves(convert: Convert, sum_of_two: Combine, mean_of_two: Combine) -> None:
    """Use a framework's vectorised arithmetic for 16-bit floats from now on.

    Args:
        convert: casts 16-bit floats to float32 and back.
        sum_of_two, mean_of_two: write the sum or the mean of two vectors, with the bits that widening, adding, halving and
            rounding once would give. Exceptions are the bits of a NaN, and a mean whose sum overflows float32, for which
            they may write the correct mean.
    """
    global _widen, _narrow, _sum, _mean
    _widen, _narrow, _sum, _mean = convert, convert, sum_of_two, mean_of_two


def widen(source: Array, target: Array) -> None:
    """Cast the 16-bit floats of ``source`` into ``target``, a float32 array of the same length."""
    _widen(source, target)


def narrow(source: Array, target: Array) -> None:
    """Round the float32 elements of ``source`` into ``target``, an array of 16-bit floats of the same length."""
    _narrow(source, target)


HALVES, _FLOATS, _PAIRS = (
    frozenset(data_type.numpy for data_type in some) for some in (HALF_PRECISION, FLOATING, COMPLEX)
)
"""The same kinds of types as sets of NumPy types: looking up a :class:`DataType` takes longer than reducing a small array."""

_LEAST_FACTOR = 1e-15
"""The smallest factor that may count as 1/n: for larger n, float64 does not distinguish 1/n from 1/(n + 1)."""


@lru_cache(maxsize=64)
def _factor(dtype: np.dtype[Any], factor: float) -> Array:
    """``factor`` as an array without dimensions, which NumPy takes in half the time of a number."""
    return np.array(factor, dtype)


def scale(array: Array, factor: float) -> None:
    """Multiply ``array`` by ``factor`` in place.

    Floating types are multiplied in their own precision (16-bit ones in float32), complex types part by part. Integers are
    multiplied in float64 and truncated towards zero, as the public interface specifies. If the factor is 1/n, integers are
    divided by n exactly instead, because 49 * (1/49) is less than 1 in float64.
    """
    if factor == 1.0:
        return
    dtype = array.dtype
    if dtype in _PAIRS:  # a complex product would turn an infinite part into NaN
        array = array.view(array.real.dtype)
        np.multiply(array, factor, out=array)
    elif dtype in HALVES:
        wide = np.empty(array.shape, np.float32)
        _widen(array, wide)
        np.multiply(wide, np.float32(factor), out=wide)
        _narrow(wide, array)
    elif dtype in _FLOATS:
        np.multiply(array, _factor(dtype, factor), out=array)
    else:
        divisor = round(1 / factor) if _LEAST_FACTOR < factor < 1.0 else 0
        if not divisor or 1 / divisor != factor:
            np.copyto(array, array.astype(np.float64) * factor, casting="unsafe")
        elif array.itemsize < 8:
            np.copyto(array, array / float(divisor), casting="unsafe")
        else:  # float64 does not represent all 64-bit integers
            quotient, remainder = np.divmod(array, divisor)
            np.add(quotient, (remainder != 0) & (array < 0), out=array)


class Workspace:
    """Scratch memory of one worker thread, grown as needed and reused, so that steady training allocates nothing."""

    def __init__(self) -> None:
        self._memory: dict[int, Array] = {}
        self._typed: dict[tuple[int, np.dtype[Any]], Array] = {}

    def array(self, index: int, dtype: np.dtype[Any], length: int) -> Array:
        """Scratch vector number ``index``, of this type and length, with arbitrary contents. It uses the memory of the last
        vector with that number."""
        typed = self._typed.get((index, dtype))
        if typed is None or typed.size < length:
            typed = self._typed[index, dtype] = self._grown(index, length * dtype.itemsize).view(dtype)
        return typed[:length]

    def _grown(self, index: int, nbytes: int) -> Array:
        """The memory of scratch vector ``index``, of at least ``nbytes``."""
        memory = self._memory.get(index)
        if memory is None or memory.size < nbytes:
            self._typed = {key: typed for key, typed in self._typed.items() if key[0] != index}
            memory = self._memory[index] = np.empty(-(-nbytes // _WIDEST) * _WIDEST, np.uint8)
        return memory

    @property
    def nbytes(self) -> int:
        """The bytes of all scratch memory."""
        return sum(memory.size for memory in self._memory.values())


_WIDEST = 16
"""The size of the widest data type."""

_FLOAT32 = np.dtype(np.float32)

_AT_ONCE = 1 << 20
"""Bytes to reduce at a time if the reduction needs scratch memory; this bounds that memory."""


def left_leaves(leaves: int) -> int:
    """How many leaves of a complete binary tree are below the left child of its root, if it has at least two."""
    half = 1 << leaves.bit_length() - 2  # of those of the last full level
    return min(2 * half, leaves - half)


def partial_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type of partial results: float32 for 16-bit floats, else ``dtype`` itself."""
    return _FLOAT32 if dtype in HALVES else dtype


def enter(contribution: Array, partial: Array, prescale: float) -> None:
    """``partial = prescale * contribution``: a leaf of the tree. The arrays share no memory."""
    if contribution.dtype in HALVES:
        _widen(contribution, partial)
    elif contribution.dtype in _FLOATS and prescale != 1.0:
        np.multiply(contribution, prescale, out=partial)
        return
    else:
        np.copyto(partial, contribution)
    scale(partial, prescale)


def combine(op: ReduceOp, left: Array, right: Array, partial: Array) -> None:
    """Write the node above two nodes of the tree, over one of them or elsewhere."""
    _FOLD[op](left, right, out=partial)


def leave(partial: Array, target: Array, postscale: float) -> None:
    """``target = postscale * partial``, rounded once: from the root of the tree to the result. Overwrites ``partial``."""
    scale(partial, postscale)
    if target.dtype in HALVES:
        _narrow(partial, target)
    else:
        np.copyto(target, partial)


def reduce_into(
    target: Array,
    contributions: Sequence[Array],
    op: ReduceOp,
    prescale: float,
    postscale: float,
    workspace: Workspace,
) -> None:
    """``target = postscale * reduce(op, [prescale * x for x in contributions])``, element by element, in the tree.

    Args:
        target: the result; may be the memory of one of the contributions, but must not overlap one in part.
        contributions: one vector per rank, in rank order, of the target's length and dtype.
        op: any reduction but AVERAGE and ADASUM.
        prescale, postscale: factors as in :func:`scale`; 16-bit floats are multiplied in float32, before they are rounded.
        workspace: scratch memory of the calling thread. Its vectors with negative numbers are used.
    """
    count, half = len(contributions), target.dtype in HALVES
    entered = half or prescale != 1.0  # else the leaves are the contributions themselves
    if target.nbytes > _AT_ONCE and (count > 2 or entered):
        most = _AT_ONCE // target.itemsize
        for start in range(0, target.size, most):
            parts = [contribution[start : start + most] for contribution in contributions]
            reduce_into(target[start : start + most], parts, op, prescale, postscale, workspace)
        return
    if half and prescale == 1.0 and op is ReduceOp.SUM and _combined_at_once(target, contributions, postscale):
        return
    if count == 2 and not entered:  # the whole tree
        combine(op, contributions[0], contributions[1], target)
        scale(target, postscale)
        return
    tree = _Tree(op, prescale, partial_type(target.dtype), workspace)
    # The target may be the memory of any contribution, so only the root is written there.
    if half:
        leave(tree.node(contributions, 0), target, postscale)
        return
    if count == 1:
        np.copyto(target, tree.node(contributions, 0))
    else:
        combine(op, *tree.children(contributions, 0), target)
    scale(target, postscale)


class _Tree(NamedTuple):
    """Computes nodes of the tree, in scratch memory by depth.

    Attributes:
        dtype: the type of partial results.
    """

    op: ReduceOp
    prescale: float
    dtype: np.dtype[Any]
    workspace: Workspace

    def node(self, contributions: Sequence[Array], depth: int) -> Array:
        """The node above these contributions, in the memory of its depth; a leaf itself if it can be used as it is."""
        first = contributions[0]
        if len(contributions) == 1 and self.prescale == 1.0 and first.dtype == self.dtype:
            return first
        partial = self.workspace.array(~depth, self.dtype, first.size)
        if len(contributions) == 1:
            enter(first, partial, self.prescale)
        else:
            combine(self.op, *self.children(contributions, depth), partial)
        return partial

    def children(self, contributions: Sequence[Array], depth: int) -> tuple[Array, Array]:
        """The nodes below the one above these contributions, in the memory of its depth and of the next one."""
        middle = left_leaves(len(contributions))
        return self.node(contributions[:middle], depth), self.node(contributions[middle:], depth + 1)


def _combined_at_once(target: Array, contributions: Sequence[Array], postscale: float) -> bool:
    """Write the sum or mean of two vectors of 16-bit floats with a single rounding, if there is a kernel for it."""
    if len(contributions) != 2:
        return False
    first, second = contributions
    if postscale == 1.0:
        return _sum(first, second, target)
    # A mean that returns False has overwritten its target, so the target must not be the memory of a contribution.
    shared = np.may_share_memory(target, first) or np.may_share_memory(target, second)
    return postscale == 0.5 and not shared and _mean(first, second, target)


def neutral(op: ReduceOp, dtype: np.dtype[Any]) -> Any:
    """The neutral element of a reduction. A rank that has joined contributes it."""
    if op == ReduceOp.PRODUCT:
        return 1
    if op == ReduceOp.BAND:
        return np.invert(np.zeros((), dtype))
    if op not in (ReduceOp.MIN, ReduceOp.MAX):
        return 0
    if dtype.kind == "b":
        return op == ReduceOp.MIN
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return limits.max if op == ReduceOp.MIN else limits.min
    return np.inf if op == ReduceOp.MIN else -np.inf


def can_fold(op: ReduceOp, data_type: DataType) -> bool:
    """Whether ``op`` is defined for this type. Complex numbers have no order, and of them only sums are computed part by part;
    bitwise reductions need integers or bools."""
    if op in OF_BITS:
        return data_type not in COMPLEX and data_type not in FLOATING
    return data_type not in COMPLEX or op in (ReduceOp.SUM, ReduceOp.AVERAGE)


def can_scale(data_type: DataType) -> bool:
    """Whether prescale and postscale factors other than 1, and therefore averages, are defined for this type."""
    return data_type is not DataType.BOOL
