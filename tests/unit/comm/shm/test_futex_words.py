"""Words of shared memory wake who sleeps on them, across processes, however the two race."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from horovod.comm.shm import futex_words as module
from horovod.comm.shm.arena import Arena
from horovod.comm.shm.futex_words import ASLEEP, PACKED, PROPOSAL, FutexWords, word_index
from time_limits import SOON
from unit.control.concurrent_ranks import ConcurrentCalls, wait_until

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="shared memory needs Linux")

ROUNDS = 20_000
LOST_SECONDS = SOON
"""A sleep that nobody ends; no other lasts so long."""


def volley(words: FutexWords, rank: int, seed: int) -> bool:
    """Answer each of the other rank's numbers with the same one, asleep or on the way to sleep; False if a wake was lost."""
    mine, other = word_index(rank, PROPOSAL), word_index(1 - rank, PROPOSAL)
    chance = random.Random(seed)
    for number in range(1, ROUNDS + 1):
        if rank == 0:
            words.publish(mine, number)
        for _ in range(chance.choice([0, 0, 1, 30])):
            pass
        while (seen := words.values[other]) < number:
            began = time.monotonic()
            words.sleep(other, seen, LOST_SECONDS)
            if time.monotonic() - began >= LOST_SECONDS:
                return False
        if rank == 1:
            words.publish(mine, number)
    return True


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create(2, 4096)
    yield made
    made.close()


def test_no_wake_is_lost(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_SLEEP_SECONDS", 2 * LOST_SECONDS)
    peer = subprocess.Popen(
        [sys.executable, __file__, str(arena.descriptor), str(arena.length)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        pass_fds=[arena.descriptor],
    )
    try:
        words = FutexWords(arena.words, arena.address, 0, 2)
        assert volley(words, 0, seed=0)
        assert peer.wait(LOST_SECONDS) == 0
        assert not any(arena.words[word_index(rank, kind)] for rank in range(2) for kind in (PACKED, ASLEEP))
        words.release()
    finally:
        peer.kill()
        peer.wait()


def test_a_word_of_anybody_can_be_overwritten_and_wakes_its_sleeper(arena: Arena) -> None:
    words = FutexWords(arena.words, arena.address, 0, 2)
    index = word_index(1, PROPOSAL)
    sleeping = ConcurrentCalls(lambda: words.sleep(index, 0, LOST_SECONDS))
    wait_until(lambda: arena.words[word_index(0, ASLEEP)] == 1, "asleep")
    words.overwrite(index, 5)
    sleeping.results()
    assert arena.words[index] == 5 and arena.words[word_index(0, ASLEEP)] == 0
    words.sleep(index, 4, LOST_SECONDS)  # it is not 4
    words.release()


if __name__ == "__main__":
    shared = Arena.attach(int(sys.argv[1]), int(sys.argv[2]), 4096)
    module.LONGEST_SLEEP_SECONDS = 2 * LOST_SECONDS
    sys.exit(not volley(FutexWords(shared.words, shared.address, 1, 2), 1, seed=1))
