"""Waiting for one another's counters in shared memory, each rank a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest

from horovod.comm.base import Aborted, PeerFailure, Stall
from horovod.comm.shm.arena import Arena
from horovod.comm.shm.counters import Counters
from horovod.comm.shm.futex_words import PACKED, FutexWords

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="shared memory needs Linux")


@pytest.fixture
def counters() -> Iterator[list[Counters]]:
    arena = Arena.create(3, 4096)
    made = [Counters(arena, rank, 3, timedelta(seconds=20)) for rank in range(3)]
    yield made
    for each in made:
        each.release()
    arena.close()


def test_an_aborted_rank_raises_aborted(counters: list[Counters]) -> None:
    counters[0].abort()
    with pytest.raises(Aborted):
        counters[0].wait(1, PACKED, 1)


def test_a_rank_that_waits_for_a_counter_that_another_has_given_up_does_not_wait_for_ever(
    counters: list[Counters],
) -> None:
    """It reports the silent rank, so that the ranks decide together what happened, if no reason is known yet."""
    counters[0].abort()
    with pytest.raises(PeerFailure, match="gave up a collective") as caught:
        counters[2].wait(1, PACKED, 1)
    assert caught.value.rank == 1
    assert caught.value.suspected


def test_a_living_owner_writes_over_what_an_abort_left(counters: list[Counters]) -> None:
    counters[0].abort()
    counters[1].signal(PACKED, 1)
    counters[2].wait(1, PACKED, 1)


def test_a_peer_does_not_count_on_what_a_rank_has_signalled_before_it_gave_up(counters: list[Counters]) -> None:
    """It may have read that rank's tensors after their memory was used for something else."""
    counters[0].signal(PACKED, 1)
    counters[0].abort()
    with pytest.raises(PeerFailure, match="gave up a collective") as caught:
        counters[1].wait(0, PACKED, 1)
    assert caught.value.rank == 0


def test_a_signal_after_an_abort_counts_for_no_rank(counters: list[Counters]) -> None:
    counters[0].abort()
    with pytest.raises(Aborted):
        counters[0].signal(PACKED, 1)
    with pytest.raises(PeerFailure, match="gave up a collective"):
        counters[1].wait(0, PACKED, 1)


def test_an_abort_at_the_moment_of_a_signal_is_not_lost(
    counters: list[Counters], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = FutexWords.publish

    def abort_first(words: FutexWords, index: int, value: int) -> None:
        counters[0].abort()
        publish(words, index, value)

    monkeypatch.setattr(FutexWords, "publish", abort_first)
    with pytest.raises(Aborted):
        counters[0].signal(PACKED, 1)
    with pytest.raises(PeerFailure, match="gave up a collective"):
        counters[1].wait(0, PACKED, 1)


def test_a_tolerated_stall_is_reported_repeatedly_until_it_ends() -> None:
    arena = Arena.create(2, 4096)
    told: list[Stall] = []

    def bear(stall: Stall) -> None:
        told.append(stall)
        if len(told) == 2:
            late.advance()  # a sign of life, after which it is counted anew
        if len(told) == 5:
            late.signal(PACKED, 1)

    waiting = Counters(arena, 0, 2, timedelta(seconds=0.05), bear)
    late = Counters(arena, 1, 2, timedelta(seconds=20))
    try:
        waiting.wait(1, PACKED, 1)
        assert [(stall.rank, stall.times) for stall in told] == [(1, 1), (1, 2), (1, 1), (1, 2), (1, 3)]
        assert told[-1].reason == "it made no progress in a collective for 0.15 seconds"
    finally:
        for each in (waiting, late):
            each.release()
        arena.close()


def test_a_peer_with_progress_is_waited_for_longer_than_the_timeout() -> None:
    arena = Arena.create(2, 4096)
    waiting, working = (Counters(arena, rank, 2, timedelta(seconds=0.3)) for rank in range(2))

    def work() -> None:
        for _ in range(12):
            time.sleep(0.1)  # all of them are longer than the timeout, each is shorter
            working.advance()
        working.signal(PACKED, 1)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        waiting.wait(1, PACKED, 1)
        with pytest.raises(PeerFailure, match="no progress"):
            waiting.wait(1, PACKED, 2)
    finally:
        thread.join()
        for each in (waiting, working):
            each.release()
        arena.close()


def test_an_aborted_rank_makes_no_progress(counters: list[Counters]) -> None:
    counters[0].abort()
    with pytest.raises(Aborted):
        counters[0].advance()
