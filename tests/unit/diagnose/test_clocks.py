"""Clocks are aligned by nothing but the collectives that ranks had in common."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from horovod.diagnose.clocks import offsets
from unit.diagnose.simulated import run


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=4),
    st.floats(1e-4, 1e-2),
    st.lists(st.floats(0.001, 0.1), min_size=4, max_size=4),
)
def test_the_difference_of_clocks_lies_within_the_error(
    clocks: list[float], latency: float, compute: list[float]
) -> None:
    folder = run([["a", "b"] * 20] * len(clocks), dict(enumerate(compute)), clocks, latency)
    found = offsets(folder.ranks)
    for rank, clock in enumerate(clocks):
        seconds, error = found[rank]
        assert abs(seconds - (clocks[0] - clock)) <= error + 1e-6
        assert error <= latency + max(compute) + 1e-6


def test_ranks_of_one_host_share_a_clock() -> None:
    assert {tuple(each) for each in offsets(run([["a"]] * 3).ranks).values()} == {(0.0, 0.0)}


def test_ranks_that_had_nothing_in_common() -> None:
    """The time of day is all there is."""
    folder = run([["a"], ["b"]], clocks=[0.0, 100.0])
    seconds, error = offsets(folder.ranks)[1]
    assert seconds == -100.0 and error == float("inf")
