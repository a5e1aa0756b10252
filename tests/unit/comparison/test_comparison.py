"""The arithmetic by which ranks find that they hold the same bytes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from horovod.comparison.comparison import all_equal, pack, terms, unpack

HELD = st.lists(st.sampled_from([b"", b"a", b"b", b"ab" * 50]), min_size=1, max_size=6)


@given(HELD, st.integers(0, 3))
def test_maxima_show_whether_all_hold_the_same(held: list[bytes], joined: int) -> None:
    own = [np.frombuffer(terms(each), np.int64) for each in held]
    neutral = np.full(2, np.iinfo(np.int64).min)  # of a rank that has joined
    largest = np.max([*own, *[neutral] * joined], axis=0)
    assert all_equal(largest.tobytes()) == (len(set(held)) == 1)


@given(st.dictionaries(st.integers(0, 2**31), st.binary(max_size=40)))
def test_rows_are_taken_apart_as_they_were_put_together(held: dict[int, bytes]) -> None:
    assert unpack(b"".join(pack(rank, each) for rank, each in held.items())) == held
