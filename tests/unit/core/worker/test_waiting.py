"""Which submission wakes the worker thread, by the state in which it waits."""

from __future__ import annotations

import pytest

from horovod.core.worker.in_flight import must_wake
from horovod.core.worker.waiting import COALESCE_SECONDS, WITH_OWN_CORE, WorkerState, polls


@pytest.mark.parametrize("driven", [False, True])
@pytest.mark.parametrize("awaited", [False, True])
def test_a_thread_that_works_is_not_woken(driven: bool, awaited: bool) -> None:
    assert not must_wake(WorkerState.AWAKE, driven, awaited, 1.0)


def test_a_thread_that_sleeps_is_woken_unless_the_caller_carries_its_request_out() -> None:
    assert must_wake(WorkerState.ASLEEP, driven=False, awaited=True, seconds=0.0)
    assert must_wake(WorkerState.ASLEEP, driven=True, awaited=False, seconds=0.0)
    assert not must_wake(WorkerState.ASLEEP, driven=True, awaited=True, seconds=1.0)


def test_a_burst_after_an_announcement_wakes_no_thread() -> None:
    assert not must_wake(WorkerState.COALESCING, driven=False, awaited=False, seconds=COALESCE_SECONDS / 2)
    assert must_wake(WorkerState.COALESCING, driven=False, awaited=False, seconds=COALESCE_SECONDS * 2)


def test_a_thread_on_standby_is_woken_for_what_no_other_thread_carries_out() -> None:
    assert must_wake(WorkerState.STANDBY, driven=False, awaited=True, seconds=0.0)
    assert not must_wake(WorkerState.STANDBY, driven=True, awaited=False, seconds=1.0)


def test_no_thread_polls_if_ranks_share_a_core() -> None:
    shared = polls(spins=False)
    assert shared.worker == 0
    assert max(shared) == 1
    assert polls(spins=True) == WITH_OWN_CORE
