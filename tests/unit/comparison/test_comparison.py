"""The arithmetic by which ranks find that they hold the same bytes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from horovod.comparison.comparison import NOTHING, differences, digest, pack, terms, unpack

HELD = st.lists(st.sampled_from([b"", b"a", b"b", b"ab" * 50]), min_size=1, max_size=6)


@given(HELD, st.integers(0, 3))
def test_maxima_show_whether_all_hold_the_same(held: list[bytes], joined: int) -> None:
    assert differences(largest([terms(each) for each in held], joined)) == (len(set(held)) > 1, False)


@given(st.lists(st.one_of(st.none(), st.binary(max_size=2)), min_size=1, max_size=6), st.integers(0, 3))
def test_maxima_show_whether_those_that_have_seen_something_have_seen_the_same(
    seen: list[bytes | None], joined: int
) -> None:
    sent = [terms(b"held", NOTHING if each is None else digest(each)) for each in seen]
    assert differences(largest(sent, joined)) == (False, len({*seen} - {None}) > 1)


def largest(sent: list[bytes], joined: int) -> bytes:
    """The maxima of what ranks have sent and of what those send that have joined."""
    neutral = np.full(4, NOTHING)
    found: bytes = np.max([*(np.frombuffer(each, np.int64) for each in sent), *[neutral] * joined], axis=0).tobytes()
    return found


@given(st.dictionaries(st.integers(0, 2**31), st.binary(max_size=40)))
def test_rows_are_taken_apart_as_they_were_put_together(held: dict[int, bytes]) -> None:
    assert unpack(b"".join(pack(rank, each) for rank, each in held.items())) == held
