"""Two paths are tried in turn, the quicker one is kept to for a while, and then it is tried again."""

from __future__ import annotations

import pytest

from horovod.comm.shm.large import _LONGEST_REST, _REST, _TRIES, _WARM, Preference

ROUND = 2 * (_WARM + _TRIES)


def go(preference: Preference, costs: tuple[float, float], calls: int) -> list[int]:
    """The paths of so many calls, which take what they cost."""
    paths = []
    for _ in range(calls):
        paths.append(preference.path)
        if not preference.trying:
            preference.rested()
            continue
        preference.took(costs[preference.path])
        if preference.due:
            preference.settle(preference.medians)
    return paths


@pytest.mark.parametrize(("costs", "quicker"), [((2.0, 1.0), 1), ((1.0, 2.0), 0), ((1.0, 1.0), 0)])
def test_the_faster_path_is_kept(costs: tuple[float, float], quicker: int) -> None:
    preference = Preference()
    assert go(preference, costs, ROUND) == [0, 1] * (ROUND // 2)
    assert go(preference, costs, _REST) == [quicker] * _REST


def test_both_paths_are_timed_again_at_growing_intervals() -> None:
    preference = Preference()
    rest, now, costs = _REST, 1, (2.0, 1.0)
    for _ in range(7):
        assert sorted(go(preference, costs, ROUND)) == [0] * (ROUND // 2) + [1] * (ROUND // 2)
        assert go(preference, costs, rest) == [now] * rest
        rest = min(2 * rest, _LONGEST_REST)
        costs, now = (costs[1], costs[0]), 1 - now
    assert rest == _LONGEST_REST


def test_a_slow_call_or_warm_up_does_not_decide_the_path() -> None:
    preference = Preference()
    for seconds in (99.0, 1.0, 9.0, 2.0, 1.0, 2.0, 1.0, 2.0):
        preference.took(seconds)
    assert preference.due and preference.medians == [1.0, 2.0]
    preference.settle(preference.medians)
    assert preference.path == 0


def test_the_times_summed_over_all_ranks_decide_the_path() -> None:
    preference = Preference()
    for _ in range(ROUND):
        preference.took(1.0 + preference.path)
    preference.settle([10.0, 9.0])
    assert preference.path == 1
