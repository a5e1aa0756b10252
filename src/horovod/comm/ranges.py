"""Parts of vectors: the views that belong to each rank, the pieces of a range, and what is copied at a time.

A :class:`Range` is some of the elements of this process's vectors. A :class:`CopyPlan` is the same for vectors of other
processes, of which a rank knows only where they lie.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from horovod.comm.datatypes import Array
from horovod.comm.spans import VECTORS, Layout, Spans, Vectors, spans_of

_ALIGNMENT = 64
"""Shards begin at multiples of this many elements, so that they never share a cache line."""


def shard_bounds(length: int, size: int) -> list[int]:
    """Where the shards of a vector of ``length`` elements begin; the last entry is its end."""
    bounds = [min(length, -(-(length * rank // size) // _ALIGNMENT) * _ALIGNMENT) for rank in range(size)]
    return [*bounds, length]


def split(array: Array, counts: Sequence[int]) -> list[Array]:
    """Views of so many elements each, one after another."""
    ends = list(accumulate(counts))
    return [array[end - count : end] for end, count in zip(ends, counts, strict=True)]


def split_by_rank(arrays: Sequence[Array], counts: Sequence[Sequence[int]]) -> list[list[Array]]:
    """By rank: the views of each array that belong to it, ``counts[i][rank]`` elements of array i after one another."""
    return [list(views) for views in zip(*map(split, arrays, counts), strict=True)]


class Range(NamedTuple):
    """Elements ``[start, stop)`` of spans: what one rank owns, or a piece of that."""

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
        """In elements."""
        return self.stop - self.start

    def piece(self, index: int, step: int) -> Range:
        """Piece ``index`` of those of ``step`` elements; an empty range past the last one."""
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


PLACE_BYTES = 16
"""Of a row of an address and a number of bytes (``iovec``)."""


class Run(NamedTuple):
    """Elements ``[begin, end)`` of one vector."""

    vector: int
    begin: int
    end: int


class Step(NamedTuple):
    """What is moved by one system call: a few bytes at least, and no more places than it takes.

    Attributes:
        first: its first row in :meth:`CopyPlan.places`; its runs are as many rows.
    """

    first: int
    runs: list[Run]
    length: int
    nbytes: int


class CopyPlan:
    """Elements ``[start, stop)`` of vectors of a layout, in steps of up to ``limit`` bytes, whoever's vectors they are.

    Ranks hold vectors of the same lengths at different addresses. What a step covers is the same for all of them, from one
    training step to the next, so it is worked out once; only the addresses are added each time.

    Attributes:
        longest: elements of the longest step.
    """

    def __init__(self, layout: Layout, start: int, stop: int, limit: int) -> None:
        self.steps: list[Step] = []
        runs: list[Run] = []
        itemsize = layout.dtype.itemsize
        most = max(limit // itemsize, 1)
        first, room = 0, most
        index = bisect_right(layout.ends, start)
        while start < stop:
            origin = layout.ends[index] - layout.sizes[index]
            end = min(layout.ends[index], stop, start + room)
            if end > start:
                runs.append(Run(index, start - origin, end - origin))
            room -= end - start
            start = end
            if start == layout.ends[index]:
                index += 1
            if start == stop or room == 0 or len(runs) - first == VECTORS:
                self.steps.append(Step(first, runs[first:], most - room, (most - room) * itemsize))
                first, room = len(runs), most
        self.longest = max([step.length for step in self.steps], default=0)
        self._vectors = np.array([run.vector for run in runs], np.intp)
        self._rows = np.empty((len(runs), 2), np.uintp)
        self._rows[:, 0] = np.array([run.begin for run in runs], np.uintp) * np.uintp(itemsize)
        self._rows[:, 1] = np.array([run.end - run.begin for run in runs], np.uintp) * np.uintp(itemsize)

    def places(self, addresses: Array) -> Array:
        """Where all runs lie, for vectors that begin at these addresses: rows of an address and a number of bytes."""
        rows: Array = self._rows.copy()
        rows[:, 0] += addresses[self._vectors]
        return rows


@lru_cache(maxsize=256)
def copy_plan(layout: Layout, start: int, stop: int, limit: int) -> CopyPlan:
    """The same batches come in every step."""
    return CopyPlan(layout, start, stop, limit)
