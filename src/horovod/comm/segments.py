"""Several vectors seen as one: how a batch of tensors is read and written in pieces without a buffer of its size.

:class:`Segments` are vectors of this process, :class:`Range` is some of their elements. A :class:`CopyPlan` is the same for
vectors of other processes, of which a rank knows only where they lie.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from horovod.comm.datatypes import Array
from horovod.comm.reduction import ReduceOp, Workspace, reduce_into
from horovod.comm.spans import VECTORS, Layout, Spans, Vectors, address_of, layout_of

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


class Segments:
    """The concatenation of vectors of one dtype, addressed by element index. Copies nothing.

    Attributes:
        count: how many vectors.
        length: elements in total.
        spans: where they lie, if that is what is known of them.
    """

    __slots__ = ("_addresses", "_arrays", "_ends", "_layout", "count", "length", "spans")

    def __init__(self, vectors: Vectors) -> None:
        self.count = len(vectors)
        self._arrays: Sequence[Array] | None = None
        self._addresses: Array | None = None
        self._layout: Layout | None = None
        self.spans: Spans | None = None
        if isinstance(vectors, Spans):
            self.spans, self._ends = vectors, vectors.layout.ends
        else:
            self._arrays = vectors
            self._ends = [vectors[0].size] if self.count == 1 else list(accumulate([each.size for each in vectors]))
        self.length = self._ends[-1] if self._ends else 0

    @property
    def arrays(self) -> Sequence[Array]:
        """The vectors as arrays."""
        if self._arrays is None:
            assert self.spans is not None
            self._arrays = self.spans.arrays()
        return self._arrays

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the elements; there is at least one vector."""
        return self.arrays[0].dtype if self.spans is None else self.spans.layout.dtype

    @property
    def layout(self) -> Layout:
        """There is at least one vector."""
        if self._layout is None:
            if self.spans is not None:
                self._layout = self.spans.layout
            else:
                self._layout = layout_of(self.dtype, tuple([array.size for array in self.arrays]))
        return self._layout

    @property
    def addresses(self) -> Array:
        """Where each vector begins, as 64-bit words."""
        if self._addresses is None:
            known = [address_of(array) for array in self.arrays] if self.spans is None else self.spans.addresses
            self._addresses = np.array(known, np.uintp)
        return self._addresses

    def part(self, vector: int, begin: int, end: int) -> Array:
        """Elements ``[begin, end)`` of one vector."""
        if self._arrays is None:
            assert self.spans is not None
            return self.spans.part(vector, begin, end)
        return self._arrays[vector][begin:end]

    def runs(self, start: int, stop: int) -> list[Array]:
        """The contiguous views that make up elements ``[start, stop)``, in order. Empty vectors do not appear."""
        if start >= stop:
            return []
        arrays, ends = self.arrays, self._ends
        if self.count == 1:
            return [arrays[0][start:stop]]
        index = bisect_right(ends, start)
        begin = start - (ends[index] - arrays[index].size)
        if stop <= ends[index]:
            return [arrays[index][begin : begin + stop - start]]
        found = [arrays[index][begin:]]
        index += 1
        while ends[index] < stop:
            if arrays[index].size:
                found.append(arrays[index])
            index += 1
        found.append(arrays[index][: stop - (ends[index] - arrays[index].size)])
        return found

    def read(self, start: int, stop: int, target: Array) -> None:
        """Copy elements ``[start, stop)`` into ``target``, which has that length ("pack")."""
        runs = self.runs(start, stop)
        if len(runs) == 1:
            np.copyto(target, runs[0])
        elif runs:
            np.concatenate(runs, out=target)

    def write(self, start: int, stop: int, source: Array, factor: float = 1.0) -> None:
        """Copy ``source`` over elements ``[start, stop)`` ("unpack"); floating types can be multiplied on the way."""
        position = 0
        scalar = source.dtype.type(factor)
        for run in self.runs(start, stop):
            part = source[position : position + run.size]
            if factor == 1.0:
                run[:] = part
            else:
                np.multiply(part, scalar, out=run)
            position += run.size

    def range(self) -> Range:
        """All elements."""
        return Range(self, 0, self.length)

    def whole(self, start: int, stop: int) -> Array | None:
        """Elements ``[start, stop)`` as one view where they lie in one vector, else None."""
        runs = self.runs(start, stop)
        return runs[0] if len(runs) == 1 else None

    def reduce(
        self,
        start: int,
        stop: int,
        contributions: Sequence[Array],
        op: ReduceOp,
        prescale: float,
        postscale: float,
        workspace: Workspace,
    ) -> None:
        """Write the reduction of ``contributions``, vectors of that length, over elements ``[start, stop)``."""
        whole = self.whole(start, stop)
        if whole is not None:
            reduce_into(whole, contributions, op, prescale, postscale, workspace)
        elif start < stop:
            result = workspace.array(2, contributions[0].dtype, stop - start)
            reduce_into(result, contributions, op, prescale, postscale, workspace)
            self.write(start, stop, result)


class Range(NamedTuple):
    """Elements ``[start, stop)`` of segments: what one rank owns, or a piece of that."""

    segments: Segments
    start: int
    stop: int

    @property
    def length(self) -> int:
        """In elements."""
        return self.stop - self.start

    def piece(self, index: int, step: int) -> Range:
        """Piece ``index`` of those of ``step`` elements; an empty range past the last one."""
        begin = min(self.start + index * step, self.stop)
        return Range(self.segments, begin, min(begin + step, self.stop))

    def whole(self) -> Array | None:
        """As :meth:`Segments.whole`."""
        return self.segments.whole(self.start, self.stop)

    def read(self, target: Array) -> None:
        """As :meth:`Segments.read`."""
        self.segments.read(self.start, self.stop, target)

    def write(self, source: Array) -> None:
        """As :meth:`Segments.write`."""
        self.segments.write(self.start, self.stop, source)


def source_and_target(inputs: Vectors, outputs: Vectors) -> tuple[Segments, Segments]:
    """Both sides of a reduction; one and the same where it is in place, which many small tensors feel."""
    source = Segments(inputs)
    return source, source if outputs is inputs else Segments(outputs)


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
