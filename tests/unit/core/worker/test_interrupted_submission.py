"""A signal handler that raises while a request is submitted: the request is carried out like any other, or it never was."""

from __future__ import annotations

import time

import numpy as np
import pytest

from horovod.core.requests.batch import Entry
from horovod.core.requests.handle import Handle
from horovod.core.worker.worker import WorkerThread
from interruptions import every_place
from unit.control.together import wait_until
from unit.core.workers import LARGE, Set, allreduce_request, asleep, ones, wait


def entry(length: int = 4) -> Entry:
    array = np.ones(length, np.float32)
    return Entry(allreduce_request("x", (length,)), [array], [array], None, Handle(), time.monotonic())


def settled(worker: WorkerThread) -> None:
    wait_until(worker._requests.none, "the end of what is in flight")
    assert not worker._requests.waiting() and not worker._requests.closed


@pytest.mark.parametrize("awaited", [False, True])
@pytest.mark.parametrize("length", [4, LARGE])
def test_submission(process_set: Set, awaited: bool, length: int) -> None:
    (rank,) = process_set.whole(1)
    tried = entry(length)

    def submit(place: int) -> None:
        rank.worker.submit(tried, awaited=awaited)

    places = 0
    for _ in every_place(submit):
        places += 1
        settled(rank.worker)
        tried = entry(length)
        asleep([rank])
    tried.handle.wait()
    wait(rank.allreduce("x", ones()))
    assert places > 5


def test_release_of_what_was_held(process_set: Set) -> None:
    (rank,) = process_set.whole(1)
    late: list[Entry] = []

    def release(place: int) -> None:
        late.append(entry())
        rank.worker.submit(late[-1], held=True)
        asleep([rank])
        rank.worker.release(late[-1])

    for _ in every_place(release):
        for each in late:
            if rank.worker.withdraw(each):
                assert not each.handle.done()
        settled(rank.worker)
        late.clear()
    wait(late[-1].handle)


def test_what_was_to_be_awaited_is_carried_out_with_the_next_at_the_latest(process_set: Set) -> None:
    (rank,) = process_set.whole(1)
    handle = rank.submit(allreduce_request("x"), ones(), awaited=True)
    for _ in every_place(lambda place: handle.wait()):  # noqa: B023  that of the moment
        wait(rank.allreduce("next", ones()))
        settled(rank.worker)
        assert handle.done() and handle.error is None
        handle = rank.submit(allreduce_request("x"), ones(), awaited=True)
    assert handle.done()
