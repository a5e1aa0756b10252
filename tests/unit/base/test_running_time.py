"""What counts as time in which a process ran: turns that come late, and others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from horovod._base.running_time import LATE_SECONDS, RunningTime

TURN = 5.0
SLEEPS = st.lists(
    st.tuples(st.floats(0, TURN), st.one_of(st.just(0.0), st.floats(0, 0.9 * LATE_SECONDS), st.floats(2, 1e5))),
    min_size=1,
    max_size=30,
)
"""A watch's turns: when each was planned, after the one before, and how much later it came."""


@given(SLEEPS, st.integers(0, 30))
def test_pauses_do_not_count_and_everything_else_does(sleeps: list[tuple[float, float]], submitted: int) -> None:
    clock = RunningTime()
    now, since, ran = 0.0, 0.0, 0.0
    for number, (planned, late) in enumerate(sleeps):
        if number == submitted:
            since, ran = now, 0.0
        clock.turn(now + planned, now + planned + late)
        now += planned + late
        ran += planned + (late if late <= LATE_SECONDS else 0.0)
    assert abs(clock.age(since, now) - ran) < 1e-6 * max(1.0, now)


@given(SLEEPS)
def test_a_limit_is_reached_after_as_many_turns_as_it_needs(sleeps: list[tuple[float, float]]) -> None:
    """However late they come: no wait is without a limit."""
    clock, now = RunningTime(), 0.0
    for number, (_, late) in enumerate(sleeps, 1):
        clock.turn(now + TURN, now + TURN + late)
        now += TURN + late
        assert clock.age(0.0, now) >= number * TURN * (1 - 1e-9)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 20)), max_size=20))
def test_pauses_that_several_threads_see_count_once(pauses: list[tuple[float, float]]) -> None:
    clock = RunningTime()
    paused: set[int] = set()
    for begin, length in pauses:
        first, last = int(begin), int(begin + length)
        clock.leave_out(first, last)
        paused |= set(range(first, last))
    assert clock.age(0.0, 200.0) == 200 - len(paused)
    assert clock.age(50.0, 200.0) == 150 - len([second for second in paused if second >= 50])
