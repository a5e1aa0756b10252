from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from horovod.comm.segments import Segments

lengths_of = st.lists(st.integers(0, 9), max_size=8)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Lengths of vectors, and a range of elements of their concatenation."""
    lengths = draw(lengths_of)
    start = draw(st.integers(0, sum(lengths)))
    return lengths, start, draw(st.integers(start, sum(lengths)))


def vectors(lengths: list[int]) -> list[np.ndarray]:
    """Vectors whose concatenation is 0, 1, 2, ..."""
    return [part.copy() for part in np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])] if lengths else []


@given(ranges())
def test_read_is_a_slice_of_the_concatenation(case: tuple[list[int], int, int]) -> None:
    lengths, start, stop = case
    segments = Segments(vectors(lengths))
    target = np.full(stop - start, -1)
    segments.read(start, stop, target)
    assert segments.length == sum(lengths)
    assert target.tolist() == list(range(start, stop))


@given(ranges())
def test_write_changes_that_slice_and_nothing_else(case: tuple[list[int], int, int]) -> None:
    lengths, start, stop = case
    arrays = vectors(lengths)
    Segments(arrays).write(start, stop, -1 - np.arange(start, stop))
    expected = [-1 - i if start <= i < stop else i for i in range(sum(lengths))]
    assert [int(element) for array in arrays for element in array] == expected


@given(ranges())
def test_runs_are_views_without_empty_ones(case: tuple[list[int], int, int]) -> None:
    lengths, start, stop = case
    arrays = vectors(lengths)
    runs = Segments(arrays).runs(start, stop)
    assert [int(element) for run in runs for element in run] == list(range(start, stop))
    assert all(run.size and any(np.shares_memory(run, array) for array in arrays) for run in runs)


@given(ranges())
def test_whole_is_the_one_run_there_is(case: tuple[list[int], int, int]) -> None:
    lengths, start, stop = case
    segments = Segments(vectors(lengths))
    whole = segments.whole(start, stop)
    runs = segments.runs(start, stop)
    if len(runs) == 1:
        assert whole is not None and whole.tolist() == list(range(start, stop))
    else:
        assert whole is None


def test_nothing() -> None:
    segments = Segments([])
    assert segments.length == 0
    assert segments.runs(0, 0) == []
    segments.read(0, 0, np.empty(0))
    segments.write(0, 0, np.empty(0))
