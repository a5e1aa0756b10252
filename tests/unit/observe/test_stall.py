"""When a stall is reported, what the report says, and whom it blames in the end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.observe.stall import SHOWN, Stalled, StallInspector


def stalled(name: str = "grad", since: float = 0.0, missing: tuple[int, ...] = (1,)) -> Stalled:
    return Stalled(name, f"allreduce(Sum) of {name}", since, [0], list(missing))


def test_nothing_is_said_before_the_time() -> None:
    inspector = StallInspector(60, 0)
    assert inspector.report([], 1000, {}) == ("", -1)
    assert inspector.report([stalled(since=941)], 1000, {}) == ("", -1)


def test_the_report_names_the_missing_and_what_they_miss() -> None:
    text, guilty = StallInspector(60, 0).report([stalled("a", 10, (1, 3)), stalled("b", 20, (3,))], 100, {})
    assert guilty == -1
    assert text.startswith(
        "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are waiting "
        "for remainder of ranks for more than 90 seconds."
    )
    lines = text.split("\n")
    assert lines[1:] == [
        "Missing ranks:",
        "1: [a]",
        "3: [a, b]",
        "a was submitted as: allreduce(Sum) of a",
        "b was submitted as: allreduce(Sum) of b",
    ]


def test_the_position_of_a_missing_rank_is_printed_beside_it() -> None:
    text, _ = StallInspector(60, 0).report([stalled(missing=(1, 2))], 100, {2: "train.py:9 in validate"})
    assert "1: [grad]\n2: [grad] (it is at train.py:9 in validate)" in text


def test_only_what_is_late_is_reported() -> None:
    text, _ = StallInspector(60, 0).report([stalled("late", 0), stalled("young", 90)], 100, {})
    assert "late" in text
    assert "young" not in text


def test_a_long_list_is_cut() -> None:
    many = [stalled(f"n{number}") for number in range(SHOWN + 3)]
    text, _ = StallInspector(60, 0).report(many, 100, {})
    assert "1: [n0, n1, n2, n3, n4, n5 ...]" in text
    assert text.count("was submitted as") == SHOWN


def test_the_report_comes_again_after_as_long() -> None:
    inspector = StallInspector(60, 0)
    said = [bool(inspector.report([stalled()], now, {})[0]) for now in (59, 60, 61, 119, 120, 121, 180)]
    assert said == [False, True, False, False, True, False, True]


def test_a_new_stall_after_a_solved_one_does_not_wait_for_the_old_ones_turn() -> None:
    inspector = StallInspector(60, 0)
    assert inspector.report([stalled(since=0)], 60, {})[0]
    assert inspector.report([], 61, {}) == ("", -1)
    assert inspector.report([stalled("next", since=2)], 62, {})[0]


def test_a_rank_that_is_missing_too_long_is_marked_and_blamed() -> None:
    inspector = StallInspector(60, 100)
    some = [stalled("old", 0, (2, 5)), stalled("young", 30, (1,))]
    text, guilty = inspector.report(some, 99, {})
    assert guilty == -1
    assert "!" not in text
    text, guilty = inspector.report(some, 100, {})
    assert guilty == 2
    for line in ("1: [young]", "2!: [old]", "5!: [old]"):
        assert line in text.split("\n")
    assert text.endswith('One or more rank (marked by "!") is stalled for longer than 100 seconds. Will shutdown.')


def test_the_end_does_not_wait_for_the_next_reports_turn() -> None:
    inspector = StallInspector(60, 100)
    assert inspector.report([stalled()], 60, {})[0]
    assert inspector.report([stalled()], 99, {}) == ("", -1)
    assert inspector.report([stalled()], 101, {})[1] == 1


def test_requests_that_wait_for_no_rank_are_no_stall() -> None:
    """All that are missing have joined, say."""
    assert StallInspector(60, 60).report([stalled(missing=())], 1000, {}) == ("", -1)


@given(
    st.lists(
        st.builds(
            stalled,
            st.text("abc", min_size=1, max_size=3),
            st.floats(0, 200),
            st.lists(st.integers(0, 5), max_size=3, unique=True).map(tuple),
        ),
        max_size=10,
    ),
    st.floats(1, 300),
    st.sampled_from([0, 50, 150]),
)
def test_the_blamed_rank_is_missing_and_late(items: list[Stalled], now: float, shutdown: int) -> None:
    text, guilty = StallInspector(20, shutdown).report(sorted(items, key=lambda item: item.since), now, {})
    if guilty >= 0:
        assert any(guilty in item.missing and now - item.since >= shutdown > 0 for item in items)
        assert f"{guilty}!: " in text
    assert bool(text) == any(item.missing and now - item.since >= 20 for item in items)


@pytest.mark.parametrize("number", [1, 1000])
def test_thousands_of_missing_ranks(number: int) -> None:
    text, _ = StallInspector(1, 0).report([stalled(missing=tuple(range(number)))], 100, {})
    assert text.count("[grad]") == number
