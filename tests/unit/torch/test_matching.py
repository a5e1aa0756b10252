"""Which message is for which receive: compared with a list of everything that was said, searched from its beginning."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from horovod.torch.distributed.point_to_point.matching import ANY, Matching, ReceiveFilter
from horovod.torch.distributed.point_to_point.messages import Envelope

sends = st.tuples(st.just("send"), st.integers(0, 1), st.integers(0, 2), st.integers(0, 1))
receives = st.tuples(st.just("receive"), st.integers(0, 1), st.integers(ANY, 2), st.integers(0, 1))


@given(st.lists(st.one_of(sends, receives), max_size=40))
def test_each_takes_the_oldest_that_fits(events: list[tuple[str, int, int, int]]) -> None:
    matching: Matching[int, int] = Matching()
    open_sends: list[tuple[int, tuple[int, int, int]]] = []
    open_receives: list[tuple[int, tuple[int, int, int]]] = []
    for number, (kind, group, source, tag) in enumerate(events):
        found: Any
        if kind == "send":
            fits = [each for each, (g, s, t) in open_receives if (g, t) == (group, tag) and s in (ANY, source)]
            found = matching.arrive(Envelope(group, source, tag, "float32", 4), number)
            assert found == (fits[0] if fits else None)
            if fits:
                open_receives = [each for each in open_receives if each[0] != fits[0]]
            else:
                open_sends.append((number, (group, source, tag)))
        else:
            fits = [each for each, (g, s, t) in open_sends if (g, t) == (group, tag) and source in (ANY, s)]
            found = matching.post(ReceiveFilter(group, source, tag), number)
            assert (found and found[1]) == (fits[0] if fits else None)
            if fits:
                open_sends = [each for each in open_sends if each[0] != fits[0]]
            else:
                open_receives.append((number, (group, source, tag)))
    assert matching.waiting() == bool(open_receives)
    assert matching.held == len(open_sends)
    assert sorted(matching.take_posted()) == sorted(number for number, _ in open_receives)
    assert not matching.waiting()
