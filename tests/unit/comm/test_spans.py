"""Vectors by their addresses are the arrays that lie there, and both forms are read and written as one vector."""

from __future__ import annotations

import ctypes
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.comm.spans import Layout, Spans, joined, size_in_bytes, spans_of


def vectors(lengths: list[int], dtype: object = np.int16) -> list[np.ndarray]:
    """Vectors whose concatenation is 0, 1, 2, ..."""
    ends = np.cumsum([0, *lengths])
    return [np.arange(start, stop).astype(dtype) for start, stop in pairwise(ends)]


forms = pytest.mark.parametrize("form", ["addresses", "arrays"])


def known_as(form: str, arrays: list[np.ndarray]) -> Spans:
    """The vectors as their addresses or as arrays."""
    return spans(arrays) if form == "addresses" else spans_of(arrays)


def spans(arrays: list[np.ndarray]) -> Spans:
    layout = Layout.of(arrays[0].dtype, [array.size for array in arrays])
    return Spans(layout, [array.ctypes.data if array.size else 0 for array in arrays])


@st.composite
def ranges(draw: st.DrawFn) -> tuple[list[int], int, int]:
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    start = draw(st.integers(0, sum(lengths)))
    return lengths, start, draw(st.integers(start, sum(lengths)))


@forms
@given(ranges())
def test_places_are_where_a_range_of_the_concatenation_lies(form: str, case: tuple[list[int], int, int]) -> None:
    lengths, start, stop = case
    arrays = vectors(lengths)
    found = b"".join(
        ctypes.string_at(int(address), int(size)) for address, size in known_as(form, arrays).iovecs(start, stop)
    )
    assert np.frombuffer(found, np.int16).tolist() == list(range(start, stop))


@pytest.mark.parametrize("dtype", [np.float32, np.bool_, np.uint16, ml_dtypes.bfloat16])
def test_arrays_are_the_same_memory(dtype: object) -> None:
    arrays = vectors([3, 0, 1], dtype)
    views = spans(arrays)
    assert len(views) == 3 and views[2].dtype == arrays[0].dtype
    for view, array in zip(views, arrays, strict=True):
        assert np.array_equal(view, array)
        view[:] = np.ones(view.size, view.dtype)
    assert all((array == 1).all() for array in arrays)
    assert views[0] is views[0]


def test_joined_spans_are_spans_where_they_can_be() -> None:
    one, two, other = spans(vectors([2, 3])), spans(vectors([4])), spans(vectors([1], np.float32))
    assert joined([one]) is one
    together = joined([one, two, one])
    assert isinstance(together, Spans)
    assert together.addresses == [*one.addresses, *two.addresses, *one.addresses]
    assert together.layout.sizes == [2, 3, 4, 2, 3] and size_in_bytes(together) == 28
    again = joined([one, two, one])
    assert isinstance(again, Spans) and again.layout is together.layout
    for parts in ([one, other], [one, vectors([2])], [vectors([2]), one]):
        found = joined(parts)
        assert not isinstance(found, Spans)
        assert len(found) == sum(len(part) for part in parts)
    assert size_in_bytes(joined([one, other])) == 14


@forms
@given(ranges())
def test_read_is_a_slice_of_the_concatenation(form: str, case: tuple[list[int], int, int]) -> None:
    lengths, start, stop = case
    arrays = vectors(lengths)
    found = known_as(form, arrays)
    target = np.full(stop - start, -1, np.int16)
    found.read(start, stop, target)
    assert found.length == sum(lengths) and len(found) == len(lengths)
    assert target.tolist() == list(range(start, stop))


@forms
@given(ranges())
def test_write_changes_that_slice_and_nothing_else(form: str, case: tuple[list[int], int, int]) -> None:
    lengths, start, stop = case
    arrays = vectors(lengths)
    known_as(form, arrays).write(start, stop, (-1 - np.arange(start, stop)).astype(np.int16))
    expected = [-1 - i if start <= i < stop else i for i in range(sum(lengths))]
    assert [int(element) for array in arrays for element in array] == expected


@forms
@given(ranges())
def test_runs_are_views_without_empty_ones(form: str, case: tuple[list[int], int, int]) -> None:
    lengths, start, stop = case
    arrays = vectors(lengths)
    found = known_as(form, arrays)
    runs = found.runs(start, stop)
    assert [int(element) for run in runs for element in run] == list(range(start, stop))
    assert all(run.size and any(np.shares_memory(run, array) for array in arrays) for run in runs)
    whole = found.whole(start, stop)
    assert (whole is None) == (len(runs) != 1)
    assert whole is None or whole.tolist() == list(range(start, stop))


@forms
@given(ranges())
def test_a_part_is_elements_of_one_vector(form: str, case: tuple[list[int], int, int]) -> None:
    lengths, start, stop = case
    arrays = vectors(lengths)
    found = known_as(form, arrays)
    before = 0
    for index, length in enumerate(lengths):
        begin, end = max(start - before, 0), min(stop - before, length)
        if begin < end:
            part = found.part(index, begin, end)
            assert part.tolist() == list(range(before + begin, before + end)) and np.shares_memory(part, arrays[index])
        before += length
    nonempty = [index for index, length in enumerate(lengths) if length]
    assert [int(found.table()[index]) for index in nonempty] == [arrays[index].ctypes.data for index in nonempty]


def test_nothing() -> None:
    nothing = spans_of([])
    assert nothing.length == len(nothing) == 0
    assert nothing.runs(0, 0) == [] and nothing.whole(0, 0) is None
    nothing.read(0, 0, np.empty(0))
    nothing.write(0, 0, np.empty(0))
