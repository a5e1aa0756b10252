"""In which steps a stretch of several vectors is gone through, whoever's they are.

Ranks hold vectors of the same lengths at different addresses. What a step covers is the same for all of them, from one
training step to the next, so it is worked out once; only the addresses are added each time.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from horovod.comm.datatypes import Array
from horovod.comm.spans import VECTORS, Layout

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
    """Elements ``[start, stop)`` of vectors of a layout, in steps of up to ``limit`` bytes."""

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
