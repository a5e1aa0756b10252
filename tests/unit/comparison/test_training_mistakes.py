"""What HOROVOD_DEBUG judges: gradients that are not finite, and ranks that have the same data."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from horovod.comparison.training_mistakes import (
    FIRST_STEPS,
    GradientWatch,
    NotFinite,
    digest_of,
    not_finite,
    same_in_all,
)

FLOATS = arrays.arrays(np.float32, st.integers(0, 20), elements=st.floats(width=32))


@given(FLOATS)
def test_what_is_not_finite_is_counted(values: np.ndarray) -> None:
    nan, infinite = int(np.isnan(values).sum()), int(np.isinf(values).sum())
    wanted = NotFinite(values.size, nan, infinite) if nan or infinite else None
    assert not_finite(values) == wanted


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16, np.complex64, np.int32, np.bool_])
def test_numbers_of_all_types_are_looked_at(kind: type) -> None:
    assert not_finite(np.ones(3, kind)) is None
    if kind not in (np.int32, np.bool_):
        assert not_finite(np.array([1, np.nan, np.inf], kind)) == NotFinite(3, 1, 1)


@given(FLOATS, FLOATS)
def test_digests_are_equal_where_all_bytes_are(one: np.ndarray, two: np.ndarray) -> None:
    assert (digest_of(one) == digest_of(two)) == (one.tobytes() == two.tobytes())


def test_digests_see_what_numbers_do_not() -> None:
    assert digest_of(np.float32([0.0])) != digest_of(np.float32([-0.0]))
    assert digest_of(np.ones((2, 3))[:, ::2]) == digest_of(np.ones((2, 2)))


@given(st.lists(st.lists(st.sampled_from([b"", b"a", b"b"]), min_size=4, max_size=4), min_size=1, max_size=4))
def test_ranks_are_the_same_if_they_are_in_each_step(held: list[list[bytes]]) -> None:
    groups = same_in_all([dict(enumerate(row)) for row in held])
    together = {(one, two) for group in groups for one in group for two in group if one < two}
    for one in range(4):
        for two in range(one + 1, 4):
            alike = all(row[one] == row[two] and row[one] for row in held)
            assert ((one, two) in together) == alike


def test_no_steps_and_a_rank_that_was_not_there() -> None:
    assert same_in_all([]) == []
    assert same_in_all([{0: b"a", 1: b"a"}, {0: b"a"}]) == []


@given(st.permutations([(name, step) for name in "abc" for step in range(1, 6)]))
def test_steps_are_counted_in_any_order(order: list[tuple[str, int]]) -> None:
    """Operations of a graph run in any order; those of one gradient one after another."""
    watch = GradientWatch()
    times = dict.fromkeys("abc", 0)
    found = []
    for name, _ in order:
        times[name] += 1
        bad = name == "b" and times[name] == 4
        told = watch.see(name, np.float32([np.inf if bad else times[name], 1.0]))
        if told is not None:
            found.append((name, told))
    assert found == [("b", (4, NotFinite(2, 0, 1)))]
    other = GradientWatch()
    for step in range(1, 6):
        for name in "abc":
            other.see(name, np.float32([step, 1.0]))
    for step in range(1, FIRST_STEPS + 1):
        assert watch.taken(step) == other.taken(step) != b""


def test_ranks_that_name_their_gradients_differently_may_have_the_same() -> None:
    """As Keras does, which numbers the models of a process."""
    taken = []
    for model in ("sequential", "sequential_1"):
        watch = GradientWatch()
        for name in ("kernel", "bias"):
            watch.see(f"{model}/{name}", np.float32([len(name), 1.0]))
        taken.append(watch.taken(1))
    assert taken[0] == taken[1] != b""


def test_gradients_of_zeros_say_nothing_of_the_data() -> None:
    watch = GradientWatch()
    watch.see("a", np.zeros(3, np.float32))
    assert watch.taken(1) == b""


def test_only_the_first_gradient_is_told() -> None:
    watch = GradientWatch()
    bad = np.float32([np.nan])
    assert watch.see("a", bad) == (1, NotFinite(1, 1, 0))
    assert watch.see("b", bad) is None and watch.see("a", bad) is None
