"""The steps in which a stretch of vectors is gone through cover it once, in order, and no step is too large."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from horovod.comm.shm.cross_memory import CopyPlan, copy_plan
from horovod.comm.spans import VECTORS, Layout

INT16 = np.dtype(np.int16)


@given(st.data(), st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(1, 50))
def test_a_stretch_is_covered_once_and_in_order(data: st.DataObject, sizes: list[int], limit: int) -> None:
    start = data.draw(st.integers(0, sum(sizes)))
    stop = data.draw(st.integers(start, sum(sizes)))
    plan = CopyPlan(Layout.of(INT16, sizes), start, stop, limit)
    origins = np.cumsum([0, *sizes])
    covered = [
        origins[run.vector] + position
        for step in plan.steps
        for run in step.runs
        for position in range(run.begin, run.end)
    ]
    assert covered == list(range(start, stop))
    first = 0
    for step in plan.steps:
        assert step.first == first
        first += len(step.runs)
        assert all(0 <= run.begin < run.end <= sizes[run.vector] for run in step.runs)
        assert step.length == sum(run.end - run.begin for run in step.runs)
        assert step.nbytes == step.length * 2 <= max(limit, 2)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12))
def test_places_are_where_the_runs_lie(sizes: list[int]) -> None:
    plan = CopyPlan(Layout.of(INT16, sizes), 0, sum(sizes), 16)
    addresses = np.arange(len(sizes), dtype=np.uintp) * np.uintp(1000)
    runs = [run for step in plan.steps for run in step.runs]
    expected = [[1000 * run.vector + 2 * run.begin, 2 * (run.end - run.begin)] for run in runs]
    assert plan.iovecs(addresses).tolist() == expected


def test_no_step_has_more_places_than_a_system_call_takes() -> None:
    plan = CopyPlan(Layout.of(INT16, [1, 0] * (2 * VECTORS)), 0, 2 * VECTORS, 1 << 20)
    assert [len(step.runs) for step in plan.steps] == [VECTORS, VECTORS]


def test_the_same_stretch_is_worked_out_once() -> None:
    layout = Layout.of(INT16, [5, 6])
    assert copy_plan(layout, 1, 9, 4) is copy_plan(layout, 1, 9, 4)
