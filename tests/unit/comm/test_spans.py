"""Vectors by their addresses are the arrays that lie there, in pieces too."""

from __future__ import annotations

import ctypes
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.comm.spans import Layout, Spans, joined, size_in_bytes


def vectors(lengths: list[int], dtype: object = np.int16) -> list[np.ndarray]:
    """Vectors whose concatenation is 0, 1, 2, ..."""
    ends = np.cumsum([0, *lengths])
    return [np.arange(start, stop).astype(dtype) for start, stop in pairwise(ends)]


def spans(arrays: list[np.ndarray]) -> Spans:
    layout = Layout.of(arrays[0].dtype, [array.size for array in arrays])
    return Spans(layout, [array.ctypes.data if array.size else 0 for array in arrays])


@st.composite
def ranges(draw: st.DrawFn) -> tuple[list[int], int, int]:
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    start = draw(st.integers(0, sum(lengths)))
    return lengths, start, draw(st.integers(start, sum(lengths)))


@given(ranges())
def test_places_are_where_a_range_of_the_concatenation_lies(case: tuple[list[int], int, int]) -> None:
    lengths, start, stop = case
    arrays = vectors(lengths)
    found = b"".join(ctypes.string_at(int(address), int(size)) for address, size in spans(arrays).places(start, stop))
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
