"""Parts of vectors: the views that belong to each rank, and the pieces of a range."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from horovod.comm.datatypes import Array
from horovod.comm.spans import Spans, Vectors, arrays_of, spans_of

_ALIGNMENT = 64
"""Shards begin at multiples of this many elements, so that they never share a cache line."""


@lru_cache(maxsize=256)
def shard_bounds(length: int, size: int) -> tuple[int, ...]:
    """The first elements of the shards of a vector of ``length`` elements; the last entry is its end."""
    bounds = [min(length, -(-(length * rank // size) // _ALIGNMENT) * _ALIGNMENT) for rank in range(size)]
    return (*bounds, length)


def split(array: Array, counts: Sequence[int]) -> list[Array]:
    """Consecutive views of an array: ``counts[i]`` elements in view i."""
    ends = list(accumulate(counts))
    return [array[end - count : end] for end, count in zip(ends, counts, strict=True)]


def parts_of(vectors: Vectors, counts: Sequence[int]) -> list[Array]:
    """By rank, the elements of an alltoall that this rank sends to that rank, or receives from it: the first ``counts[rank]``
    elements of that rank's vector, or consecutive elements if there is one vector for all ranks."""
    arrays = arrays_of(vectors)
    if len(arrays) == 1:
        return split(arrays[0], counts)
    return [array[:count] for array, count in zip(arrays, counts, strict=True)]


def split_by_rank(arrays: Sequence[Array], counts: Sequence[Sequence[int]]) -> list[list[Array]]:
    """By rank, the views that belong to that rank: ``counts[i][rank]`` consecutive elements of each array i."""
    return [list(views) for views in zip(*map(split, arrays, counts), strict=True)]


class Range(NamedTuple):
    """Elements ``[start, stop)`` of spans: the part that one rank owns, or a piece of that part."""

    spans: Spans
    start: int
    stop: int

    @classmethod
    def of(cls, vectors: Vectors) -> Range:
        """All elements of vectors of one dtype."""
        spans = spans_of(vectors)
        return cls(spans, 0, spans.length)

    @property
    def length(self) -> int:
        """The number of elements."""
        return self.stop - self.start

    def piece(self, index: int, step: int) -> Range:
        """Piece ``index`` of this range, cut into pieces of ``step`` elements; an empty range past the last piece."""
        begin = min(self.start + index * step, self.stop)
        return Range(self.spans, begin, min(begin + step, self.stop))

    def whole(self) -> Array | None:
        """As :meth:`Spans.whole`."""
        return self.spans.whole(self.start, self.stop)

    def read(self, target: Array) -> None:
        """As :meth:`Spans.read`."""
        self.spans.read(self.start, self.stop, target)

    def write(self, source: Array) -> None:
        """As :meth:`Spans.write`."""
        self.spans.write(self.start, self.stop, source)
