"""The descriptors and cores of a worker, and submissions at moments in which its state changes."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from horovod.core.requests.handle import Handle
from horovod.core.worker import in_flight as requests_module
from horovod.core.worker.coordinator import Coordinator
from horovod.core.worker.cpu_affinity import CpuPlacement
from horovod.observe.timeline import Timeline
from time_limits import SOON
from unit.control.concurrent_ranks import wait_until
from unit.core.workers import (
    LARGE,
    SECONDS,
    Rank,
    Set,
    asleep,
    ones,
    wait,
)


def test_the_descriptors_that_a_forked_child_must_close_are_listed(process_set: Set) -> None:
    rank, _ = process_set.part(0, 3)
    descriptors = rank.worker.descriptors()
    assert len(set(descriptors)) == 4
    for descriptor in descriptors:
        os.fstat(descriptor)


def test_a_worker_can_be_bound_to_a_core(process_set: Set) -> None:
    core = min(os.sched_getaffinity(0))
    rank, _ = process_set.part(0, 1, start=False, placement=CpuPlacement(core))
    found: list[set[int]] = []
    rank.communicator.before = lambda: found.append(os.sched_getaffinity(0))
    rank.worker.start()
    wait(rank.allreduce("x", ones()))
    assert found == [{core}]


def test_a_core_that_this_machine_does_not_have_is_an_error_in_the_log_and_nothing_else(
    process_set: Set, caplog: pytest.LogCaptureFixture
) -> None:
    rank, _ = process_set.part(0, 1, start=False, placement=CpuPlacement(1_000_000))
    rank.worker.start()
    wait(rank.allreduce("x", ones()))
    assert "core 1000000" in caplog.text


@pytest.mark.parametrize("share", [{0}, {1_000_000}])
def test_large_collectives_run_on_this_ranks_share_of_the_cores(process_set: Set, share: set[int]) -> None:
    """On any, where they are not to be had."""
    everywhere = os.sched_getaffinity(0)
    cores = {min(everywhere)} if share == {0} else share
    rank, _ = process_set.part(0, 1, start=False, placement=CpuPlacement(share=frozenset(cores)))
    found: list[set[int]] = []
    rank.communicator.before = lambda: found.append(os.sched_getaffinity(0))
    rank.worker.start()
    for length in (4, LARGE, 4):
        handle = rank.allreduce("x", ones(length=length))
        handle.leave_to_worker()
        wait_until(handle.done, "the worker thread")
    assert found == [everywhere, cores & everywhere or everywhere, everywhere]


def test_a_submission_at_the_moment_in_which_the_worker_looks_for_its_oldest(
    process_set: Set, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, _ = process_set.part(1, 2)
    threads: list[threading.Thread] = []

    def interrupted_iter(thing: Any) -> Any:
        """What another thread does between two steps of this one."""
        made = iter(thing)
        name = f"n{len(threads)}"
        threads.append(threading.Thread(target=lambda: rank.allreduce(name, ones())))
        threads[-1].start()
        threads[-1].join(0.1)
        return made

    monkeypatch.setattr(requests_module, "iter", interrupted_iter, raising=False)
    rank.allreduce("first", ones())
    wait_until(lambda: threads, "the interruption")
    threading.Event().wait(0.1)
    monkeypatch.undo()
    assert not rank.worker.join(0)
    assert rank.watch.reports == []
    for thread in threads:
        thread.join(SOON)


def test_several_threads_submit_at_the_same_time(process_set: Set) -> None:
    ranks = process_set.whole(2)
    handles: list[Handle] = []

    def train(rank: Rank, thread: int) -> None:
        for number in range(40):
            handle = rank.allreduce(f"{thread}.{number}", ones())
            handles.append(handle)
            if number % 5 == 0:
                handle.wait(SECONDS)

    threads = [threading.Thread(target=train, args=(rank, number)) for number in range(3) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    wait(*handles)
    assert len(handles) == 240


def test_leaving_at_the_moment_in_which_the_worker_reads_its_wake_up(process_set, monkeypatch):
    """Its byte in the pipe goes with the one that is read; the wish must not."""
    rank, _ = process_set.part(0, 1)
    asleep([rank])
    wake_up = rank.worker.descriptors()  # it has no peers
    real, once = os.read, []

    def read(descriptor, length):
        if descriptor in wake_up and not once:
            once.append(1)
            rank.worker.leave("done")
        return real(descriptor, length)

    monkeypatch.setattr(os, "read", read)
    rank.allreduce("x", ones())  # wakes a worker thread that sleeps
    assert rank.worker.join(SOON)
    assert once


def test_a_timeline_that_another_thread_stops_at_any_moment_ends_no_job(
    process_set: Set, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two looks at it."""
    timeline = Timeline(str(tmp_path / "timeline.json"))
    looks = itertools.count()
    attribute = property(lambda _: timeline if next(looks) % 2 == 0 else None, lambda *_: None)
    monkeypatch.setattr(Coordinator, "timeline", attribute, raising=False)
    ranks = process_set.whole(2)
    for turn in range(50):
        wait(*(rank.allreduce(f"n{turn % 7}", ones()) for rank in ranks))
    timeline.close()
    assert [rank.watch.reports for rank in ranks] == [[]] * 2
