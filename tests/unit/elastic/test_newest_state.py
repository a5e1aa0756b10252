"""Whose state the ranks of a new round take over."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from horovod.elastic.newest_state import NOWHERE, StateReport, furthest


def test_at_the_start_it_is_rank_0() -> None:
    assert furthest([StateReport(0, 0, 0)] * 3) == (0, True)


def test_a_rank_that_completed_one_step_more_is_followed() -> None:
    assert furthest([StateReport(1, 6, 0), StateReport(1, 7, 0), StateReport(1, 7, 0)]) == (1, True)


def test_a_new_process_is_never_followed() -> None:
    assert furthest([StateReport(0, 0, 0), StateReport(2, NOWHERE, 0)]) == (1, False)


def test_where_no_rank_is_at_the_end_of_a_step_the_last_save_counts() -> None:
    assert furthest([StateReport(1, NOWHERE, 4), StateReport(1, NOWHERE, 5)]) == (1, False)


def test_a_save_that_is_newer_than_what_survived_of_steps_counts() -> None:
    """The rank that is behind is at the end of step 4; the one ahead failed after it had saved step 5."""
    assert furthest([StateReport(1, 4, 0), StateReport(1, NOWHERE, 5)]) == (1, False)


REPORTS = st.builds(StateReport, st.integers(0, 2), st.integers(NOWHERE, 5), st.integers(0, 5))


@given(st.lists(REPORTS, min_size=1, max_size=6))
def test_no_rank_is_further_ahead_than_the_chosen_one(reports: list[StateReport]) -> None:
    root = furthest(reports)
    chosen = reports[root.rank]
    step = chosen.live if root.live else chosen.saved
    peers = [each for each in reports if each.rounds] or reports
    assert chosen in peers
    assert step == max(max(each.live, each.saved) for each in peers)
