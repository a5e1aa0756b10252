"""Settings that an order carries hold on every rank from the same collective on, also where most need no order."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import pytest

from horovod.autotune.kept import Tuned
from horovod.comm.tuned import TunedSettings
from horovod.core.requests.handle import Handle
from horovod.core.worker.coordinator import Coordinator
from time_limits import SOON
from unit.core.workers import MEDIUM, Rank, Set, on_every_rank

COLLECTIVES = 160
BIG = 300_000
"""Elements of an array that travels in pieces."""


class Changes:
    """A tuner that has something due after every few collectives of rank 0."""

    looking = False
    over = False

    def __init__(self) -> None:
        self.due: Tuned | None = None
        self.sent = 0
        self._random = random.Random(1)

    def seen(self, name: str, nbytes: int, tensors: Iterable[str], now: float) -> None:
        if self.due is None and self._random.random() < 0.3:
            threshold = self._random.choice([0, 4096, 1 << 20])
            direct = self._random.choice(["auto", "always", "never"])
            self.due = Tuned(TunedSettings(threshold, self.sent, "shm", direct, True, True))

    def interrupt(self) -> None:
        """Nothing is measured."""

    def take(self) -> Tuned | None:
        due, self.due = self.due, None
        self.sent += due is not None
        return due


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("burst", [1, 4])
@pytest.mark.parametrize("fast_path", [True, False])
def test_all_ranks_change_at_the_same_collective(process_set: Set, size: int, burst: int, fast_path: bool) -> None:
    ranks = process_set.whole(size, proposals=fast_path)
    tuner = Changes()
    role = ranks[0].worker.role
    assert isinstance(role, Coordinator)
    role.tuner = tuner  # type: ignore[assignment]  # a stand-in with what a coordinator uses
    held: list[list[TunedSettings | None]] = [[] for _ in range(size)]
    sizes = random.Random(2).choices([3, 100, MEDIUM, BIG], [8, 8, 4, 1], k=COLLECTIVES)

    def run(rank: Rank) -> None:
        handles: list[tuple[Handle, np.ndarray]] = []
        for number, length in enumerate(sizes):
            array = np.ones(length, np.float32)
            handles.append((rank.allreduce(f"x{number % 20}", array), array))
            if len(handles) == burst:
                for handle, result in handles:
                    handle.wait(SOON)
                    assert (result == size).all()
                    held[rank.worker.index].append(handle.tuned)
                handles.clear()

    on_every_rank(ranks, run)
    assert all(found == held[0] for found in held)
    assert len({each.bucket_bytes for each in held[0] if each is not None}) > 3, "nothing has changed"
