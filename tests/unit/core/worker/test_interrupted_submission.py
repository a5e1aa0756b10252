"""A signal handler that raises while a request is submitted: the request is carried out like any other, or it never was."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest

from horovod.core.negotiation.messages import UNNAMED
from horovod.core.requests.batch import Entry
from horovod.core.requests.handle import Handle
from interruptions import every_point
from unit.control.concurrent_ranks import wait_until
from unit.core.workers import LARGE, Rank, Set, allreduce_request, asleep, ones, wait


def entry(length: int = 4) -> Entry:
    array = np.ones(length, np.float32)
    return Entry(allreduce_request("x", (length,)), [array], [array], None, Handle(), time.monotonic())


def settled(rank: Rank) -> None:
    wait_until(lambda: not rank.worker.pending(), "the end of what is in flight")
    assert rank.watch.reports == [], "something was announced that is not in flight"
    assert not rank.worker.join(0)


@pytest.mark.parametrize("awaited", [False, True])
@pytest.mark.parametrize("length", [4, LARGE])
def test_submission(process_set: Set, awaited: bool, length: int) -> None:
    (rank,) = process_set.whole(1)
    tried = entry(length)

    def submit(point: int) -> None:
        rank.worker.submit(tried, awaited=awaited)

    points = 0
    for _ in every_point(submit):
        points += 1
        settled(rank)
        tried = entry(length)
        asleep([rank])
    tried.handle.wait()
    wait(rank.allreduce("x", ones()))
    assert points > 5


def test_release_of_what_was_held(process_set: Set) -> None:
    (rank,) = process_set.whole(1)
    late: list[Entry] = []

    def release(point: int) -> None:
        late.append(entry())
        rank.worker.submit(late[-1], held=True)
        asleep([rank])
        rank.worker.release(late[-1])

    for _ in every_point(release):
        for each in late:
            if rank.worker.withdraw(each):
                assert not each.handle.done()
        settled(rank)
        late.clear()
    wait(late[-1].handle)


def test_an_awaited_request_runs_with_the_next_one_at_the_latest(process_set: Set) -> None:
    (rank,) = process_set.whole(1)
    handle = rank.submit(allreduce_request("x"), ones(), awaited=True)
    for _ in every_point(lambda point: handle.wait()):  # noqa: B023  that of the moment
        wait(rank.allreduce("next", ones()))
        settled(rank)
        assert handle.done() and handle.error is None
        handle = rank.submit(allreduce_request("x"), ones(), awaited=True)
    assert handle.done()


@pytest.mark.parametrize("held", [False, True])
def test_a_call_without_a_name_counts_if_it_is_submitted(process_set: Set, held: bool) -> None:
    (rank,) = process_set.whole(1)
    request = msgspec.structs.replace(allreduce_request(f"x{UNNAMED}", (4,)), transient=True, unnamed=True)
    tried: list[Entry] = []

    def submit(point: int) -> None:
        array = np.ones(4, np.float32)
        tried.append(Entry(request, [array], [array], None, Handle(), time.monotonic()))
        rank.worker.submit(tried[-1], held=held)

    submitted, points = 0, 0
    for _ in every_point(submit):
        points += 1
        if tried and not tried[-1].request.unnamed:
            assert tried[-1].request.name == f"x.noname.{submitted + 1}"
        if tried and (rank.worker.withdraw(tried[-1]) if held else not tried[-1].request.unnamed):
            submitted += not held
        tried.clear()
        settled(rank)
    assert points > 5
    assert tried[-1].request.name == f"x.noname.{submitted + 1}"
    assert tried[-1].request.tensors[0].name == f"x.noname.{submitted + 1}"
    rank.worker.release(tried[-1])
    tried[-1].handle.wait()
