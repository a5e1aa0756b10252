"""The arithmetic by which ranks find that they hold the same bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from horovod.comparison.comparison import all_equal, pack, sum_terms, unpack

HELD = st.lists(st.sampled_from([b"", b"a", b"b", b"ab" * 50]), min_size=1, max_size=6)


@given(HELD, st.integers(0, 3))
def test_sums_show_on_every_rank_alike_whether_all_hold_the_same(held: list[bytes], joined: int) -> None:
    own = [sum_terms(each) for each in held]
    sums = sum(own) + joined * 0 * own[0]  # a rank that has joined adds zeros
    assert [all_equal(each, sums) for each in own] == [len(set(held)) == 1] * len(held)
    assert sums[0] == len(held)


def test_sums_of_many_ranks_do_not_overflow() -> None:
    most = sum_terms(b"x")
    most[1:] = [2**24 - 1, (2**24 - 1) ** 2] * 2
    other = most.copy()
    other[1:3] = [2**24 - 2, (2**24 - 2) ** 2]
    ranks = 2**14
    assert all_equal(most, most * ranks) and not all_equal(most, most * (ranks - 1) + other)


@given(st.dictionaries(st.integers(0, 2**31), st.binary(max_size=40)))
def test_rows_are_taken_apart_as_they_were_put_together(held: dict[int, bytes]) -> None:
    assert unpack(b"".join(pack(rank, each) for rank, each in held.items())) == held
