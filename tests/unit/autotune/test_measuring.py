"""The speed of a job, from the names, sizes and times of its collectives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from horovod.autotune.measuring import MEASUREMENTS, Meter, Recurring
from references import kept


@given(
    sizes=st.lists(st.integers(1, 1 << 30), min_size=1, max_size=8),
    repeats=st.integers(1, 3),
    steps=st.integers(1, 12),
    seconds=st.floats(0.001, 10),
)
def test_the_speed_of_equal_steps_is_exact(sizes: list[int], repeats: int, steps: int, seconds: float) -> None:
    """Whatever a step contains: a small collective may come several times in it."""
    meter = Meter(steps * repeats)
    names = [*(f"bucket.{index}" for index in range(len(sizes))), *["record"] * repeats]
    score, now = None, 0.0
    for _ in range(MEASUREMENTS * steps * repeats + 1):
        for name, size in zip(names, [*sizes, *[0] * repeats], strict=True):
            score = score if score is not None else meter.seen(name, size, now)
        now += seconds
    assert score is not None
    assert abs(score * seconds / sum(sizes) - 1) < 1e-6


@given(st.floats(2, 1000))
def test_one_slow_measurement_does_not_count(slowness: float) -> None:
    meter = Meter(1)
    found = None
    for step in range(MEASUREMENTS + 1):
        found = meter.seen("a", 100, step + (slowness if step > 2 else 0))
    assert found == 100


def test_names_that_never_come_again_end_no_trial_and_fill_no_memory() -> None:
    meter = Meter(1)
    names = [str(number) for number in range(250_000)]
    assert all(meter.seen(name, 1, float(number)) is None for number, name in enumerate(names))
    assert 0 < kept(names) <= 100_001


def test_rare_requests_are_not_measured() -> None:
    recurring = Recurring(3)
    for step in range(6):
        recurring.seen("weight")
        if step % 3 == 0:
            recurring.seen("metric")
    assert recurring.found() == ["weight"] and recurring.most() == 6
