r"""Adasum over any engine: a reduction that adds gradients where they differ and averages them where they agree.

Two vectors combine to ``r(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b``: orthogonal vectors are added, equal vectors
stay as they are, and ``r`` is symmetric. More than two combine in a binary tree over the ranks. On each level neighbours
combine, (0, 1), (2, 3), ...; if their number is odd, the last one goes up unchanged::

    0   1   2   3   4        five ranks
     \ /     \ /    |
      01      23    4
        \    /      |
         0123       4
            \      /
             01234

If the number of ranks is a power of two, all ranks have the same weight; otherwise the last ones take part in fewer
combinations. Exchanging two vectors that combine with each other, or two subtrees that do, changes no bit of the result;
other permutations may.

Adasum uses only the collectives of a :class:`~horovod.comm.base.Communicator`, in three phases:

* scatter: an alltoall gives rank j the j-th share of every rank's vectors;
* combine: on each level every rank computes dot products of its shares, an allreduce adds them over the ranks, and then
  every rank combines its shares;
* gather: an allgather brings the shares of the result together.

Dot products and shares are computed per tensor, so the bits of a result do not depend on the batch in which the tensor
travelled. Dot products are summed in float64. 16-bit floats are combined in float32 and rounded once.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020 (arXiv:2006.02924).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from horovod.comm.base import Communicator
from horovod.comm.datatypes import FLOATING, HALF_PRECISION, Array, DataType, data_type_of
from horovod.comm.reduction import ReduceOp, narrow, scale, widen

PORTION_BYTES = 8 << 20
"""A batch is reduced in portions of whole tensors of at most this size (or of one larger tensor). That bounds memory: beside
the caller's arrays a portion needs twice its size, in 16-bit types three times."""

_BLOCK = 8192
"""Elements to widen to float64 at a time: few enough that blocks stay in the cache, and that BLAS uses no threads."""

_NOTHING = float(np.sqrt(np.finfo(np.float64).tiny))
"""A squared norm below this counts as zero; a vector with such a norm is added as it is."""


def can_combine(data_type: DataType) -> bool:
    """Whether Adasum is defined for this type."""
    return data_type in FLOATING


def adasum(
    communicator: Communicator, inputs: Sequence[Array], outputs: Sequence[Array], prescale: float, postscale: float
) -> None:
    """``outputs[i] = postscale * Adasum(prescale * inputs[i] of every rank)``, with the same bits on every rank.

    Every rank of the group must call it with matching arguments. An infinite element or a NaN makes all elements of its tensor
    NaN on all ranks.

    Args:
        communicator: of the group.
        inputs: one-dimensional arrays of one floating-point dtype; each one is a tensor, with its own dot products.
        outputs: arrays of the same lengths and dtype; an output may be its input.
        prescale, postscale: factors as in :func:`horovod.comm.reduction.scale`.

    Raises:
        PeerFailure, Aborted: as the communicator's collectives.
    """
    if communicator.size == 1:
        communicator.allreduce(inputs, outputs, ReduceOp.SUM, prescale, postscale)
        return
    for start, stop in _portions(inputs):
        _adasum(communicator, inputs[start:stop], outputs[start:stop], prescale, postscale)


def _portions(arrays: Sequence[Array]) -> Iterator[tuple[int, int]]:
    """Ranges of indices, each of arrays of at most :data:`PORTION_BYTES` together, or of one larger array."""
    start, filled = 0, 0
    for index, array in enumerate(arrays):
        if index > start and filled + array.nbytes > PORTION_BYTES:
            yield start, index
            start, filled = index, 0
        filled += array.nbytes
    if filled:
        yield start, len(arrays)


def _adasum(
    communicator: Communicator, inputs: Sequence[Array], outputs: Sequence[Array], prescale: float, postscale: float
) -> None:
    rank, size = communicator.rank, communicator.size
    # shares[i][r] is the first element of rank r's share of tensor i; the last entry is the tensor's end.
    shares = [[array.size * r // size for r in range(size + 1)] for array in inputs]
    mine = [bounds[rank + 1] - bounds[rank] for bounds in shares]
    # tensors[i] is the first element of tensor i in the concatenation of this rank's shares.
    tensors = [0, *np.cumsum(mine).tolist()]
    vectors = _scatter(communicator, inputs, shares, tensors[-1], prescale)
    while len(vectors) > 1:
        vectors = _combine_neighbours(communicator, vectors, tensors)
    result = vectors[0]
    scale(result, postscale)
    if result.dtype != inputs[0].dtype:
        rounded = np.empty(result.size, inputs[0].dtype)
        narrow(result, rounded)
        result = rounded
    counts = [[stop - start for start, stop in pairwise(bounds)] for bounds in shares]
    communicator.allgather([result[start:stop] for start, stop in pairwise(tensors)], outputs, counts)


def _scatter(
    communicator: Communicator, inputs: Sequence[Array], shares: Sequence[Sequence[int]], length: int, prescale: float
) -> list[Array]:
    """By rank, this rank's shares of that rank's tensors: concatenated, scaled, in the type in which they are combined."""
    size, dtype = communicator.size, inputs[0].dtype
    send_counts = [sum(bounds[r + 1] - bounds[r] for bounds in shares) for r in range(size)]
    if len(inputs) == 1:
        source = inputs[0]  # the shares of one tensor are already in rank order
    else:
        source = np.concatenate(
            [
                array[bounds[r] : bounds[r + 1]]
                for r in range(size)
                for array, bounds in zip(inputs, shares, strict=True)
            ]
        )
    received = np.empty(size * length, dtype)
    communicator.alltoall([source], [received], send_counts, [length] * size, max(send_counts))
    if data_type_of(received) in HALF_PRECISION:
        wide = np.empty(received.size, np.float32)
        widen(received, wide)
        received = wide
    scale(received, prescale)
    return (
        [received[start : start + length] for start in range(0, size * length, length)] if length else [received] * size
    )


def _combine_neighbours(communicator: Communicator, vectors: Sequence[Array], tensors: Sequence[int]) -> list[Array]:
    """Combine one level of the tree. Overwrites the first vector of each pair with the result, the second with intermediate
    values."""
    pairs = list(zip(vectors[0::2], vectors[1::2], strict=False))
    dots = np.zeros((len(pairs), len(tensors) - 1, 3))
    for (a, b), row in zip(pairs, dots, strict=True):
        for (start, stop), three in zip(pairwise(tensors), row, strict=True):
            _dot_products(a[start:stop], b[start:stop], three)
    everyones = dots.reshape(-1)
    communicator.allreduce([everyones], [everyones], ReduceOp.SUM, 1.0, 1.0)
    for (a, b), row in zip(pairs, dots, strict=True):
        for (start, stop), (ab, aa, bb) in zip(pairwise(tensors), row.tolist(), strict=True):
            _combine(a[start:stop], b[start:stop], _coefficient(ab, aa), _coefficient(ab, bb))
    return [a for a, _ in pairs] + list(vectors[2 * len(pairs) :])


def _dot_products(a: Array, b: Array, three: Array) -> None:
    """Add a.b, |a|^2 and |b|^2 to the elements of ``three``, computed block by block in float64."""
    wide_a, wide_b = np.empty((2, min(a.size, _BLOCK)))
    for start in range(0, a.size, _BLOCK):
        length = min(_BLOCK, a.size - start)
        x, y = wide_a[:length], wide_b[:length]
        x[:] = a[start : start + length]
        y[:] = b[start : start + length]
        three[0] += x.dot(y)
        three[1] += x.dot(x)
        three[2] += y.dot(y)


def _coefficient(dot: float, squared_norm: float) -> float:
    return 1.0 if squared_norm < _NOTHING else 1.0 - dot / (2.0 * squared_norm)


def _combine(a: Array, b: Array, of_a: float, of_b: float) -> None:
    """``a = of_a * a + of_b * b``."""
    np.multiply(a, a.dtype.type(of_a), out=a)
    np.multiply(b, b.dtype.type(of_b), out=b)
    np.add(a, b, out=a)
