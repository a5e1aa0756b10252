"""The numbers of completed calls in shared memory, among ranks inside this one process."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from engines import proposals_of, propose
from horovod.comm.shm.completed_calls import CompletedCalls
from horovod.comm.shm.proposals import Proposals
from time_limits import JOB
from unit.control.concurrent_ranks import wait_until


class Rank(NamedTuple):
    """One rank's view of the memory."""

    proposals: Proposals
    calls: CompletedCalls


@pytest.fixture(params=[2, 3, 8])
def group(request: pytest.FixtureRequest) -> Iterator[list[Rank]]:
    made = [Rank(each, each.completed_calls(1)) for each in proposals_of(request.param)]
    yield made
    for rank in made:
        rank.proposals.close()


@pytest.mark.parametrize("seed", range(20))
def test_every_rank_sees_the_lowest_number(group: list[Rank], seed: int) -> None:
    chance, completed = random.Random(seed), [0] * len(group)
    for _ in range(100):
        rank = chance.randrange(len(group))
        completed[rank] += chance.randint(1, 5)
        group[rank].calls.publish(completed[rank])
        lowest = min(completed)
        assert all(each.calls.lowest() == lowest for each in group)
        assert all(each.calls.await_all(lowest, 0) for each in group)
        assert not any(each.calls.await_all(lowest + 1, 0) for each in group)


def test_a_rank_that_waits_is_woken_by_the_last(group: list[Rank]) -> None:
    first, *others = (each.calls for each in group)
    first.publish(1)
    seen = threading.Event()

    def wait() -> None:
        for _ in range(1000):
            if first.await_all(1, 1.0):
                seen.set()
                return

    thread = threading.Thread(target=wait)
    thread.start()
    for each in others:
        assert not seen.is_set()
        each.publish(1)
    thread.join(JOB)
    assert seen.is_set()


def test_a_rank_that_proposes_does_not_disturb_one_that_waits_for_calls(group: list[Rank]) -> None:
    woken = []
    thread = threading.Thread(target=lambda: woken.append(group[0].calls.await_all(1, 1.0)))
    thread.start()
    for number, rank in enumerate(group):
        propose(rank.proposals, b"x", [])
        rank.calls.publish(1)
        assert number == len(group) - 1 or group[0].calls.lowest() == 0
    wait_until(lambda: not thread.is_alive())
    assert group[0].calls.await_all(1, 0)


def test_the_numbers_of_a_rank_stay_when_it_ends(group: list[Rank]) -> None:
    for each in group:
        each.calls.publish(7)
    last = group[-1]
    last.proposals.close()
    assert not last.calls.is_open() and last.calls.lowest() == 0 and not last.calls.await_all(1, 1)
    last.calls.publish(8)  # nobody sees it
    assert all(each.calls.lowest() == 7 for each in group[:-1])
