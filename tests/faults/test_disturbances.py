"""Ranks that dawdle, keep the interpreter's lock, and leave as soon as they have what they wanted: no result is lost.

Whatever is carried out in one step, by order, or by the thread that waits, ranks come to it early and late in every order; each
job is a few collectives long, so that its end comes upon them as well.
"""

from __future__ import annotations

import ctypes
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import horovod.torch as hvd
from part import some
from ranks import RankPool

JOBS = 50
LENGTHS = [1, 3, 100, 5_000, 300_000]


def dawdle(own: random.Random) -> None:
    """Sleep, keep all threads of this process from running, or do nothing."""
    chance = own.random()
    if chance < 0.15:
        time.sleep(own.choice([0.0005, 0.003, 0.012, 0.03]))
    elif chance < 0.3:
        ctypes.PyDLL(None).usleep(own.choice([200, 2_000, 9_000, 12_000, 40_000]))


def collective(what: str, name: str | None, data: torch.Tensor, root: int, own: random.Random) -> None:
    """One, and what must come out of it. ``data`` is the same on all ranks."""
    rank, size = hvd.rank(), hvd.size()
    total = size * (size + 1) // 2
    if what == "allreduce":
        assert torch.equal(hvd.allreduce(data * (rank + 1), op=hvd.Sum, name=name), data * total)
    elif what == "broadcast":
        assert torch.equal(hvd.broadcast(data * (rank + 1), root, name=name), data * (root + 1))
    elif what == "allgather":
        gathered = hvd.allgather(torch.full((rank + 1, 2), float(rank)), name=name)
        assert gathered.tolist() == [[float(peer)] * 2 for peer in range(size) for _ in range(peer + 1)]
    elif what == "several":
        handles = [
            hvd.allreduce_async(data + rank, op=hvd.Sum, name=f"several.{number}") for number in range(root * 9 + 2)
        ]
        dawdle(own)
        for handle in handles:
            assert torch.equal(hvd.synchronize(handle), data * size + total - size)
    elif what == "grouped":
        first, second = hvd.grouped_allreduce([data, data * (rank + 1)], op=hvd.Sum, name=name)
        assert torch.equal(first, data * size) and torch.equal(second, data * total)
    elif what == "reducescatter":
        assert torch.equal(
            hvd.reducescatter(torch.full((size * 2, 3), rank + 1.0), op=hvd.Sum), torch.full((2, 3), total)
        )
    elif what == "alltoall":
        assert hvd.alltoall(torch.full((size,), float(rank))).tolist() == list(range(size))
    else:
        hvd.barrier()


WHAT = [
    "allreduce",
    "allreduce",
    "broadcast",
    "allgather",
    "several",
    "grouped",
    "reducescatter",
    "alltoall",
    "barrier",
]


def jobs(seed: int) -> int:
    """Runs on every rank; how many collectives there were."""
    common, own = random.Random(seed), random.Random(f"{seed} {os.environ['HOROVOD_RANK']}")
    done = 0
    for _ in range(JOBS):
        with job():
            for number in range(common.choice([1, 1, 2, 3, 8])):
                what, root = common.choice(WHAT), common.randrange(hvd.size())
                name = f"{what}.{number}" if common.random() < 0.7 else None
                data = torch.arange(common.choice(LENGTHS), dtype=torch.float32) % 17
                dawdle(own)
                collective(what, name, data, root, own)
                done += 1
    return done


@contextmanager
def job() -> Iterator[None]:
    hvd.init()
    try:
        yield
    finally:
        hvd.shutdown()


@pytest.mark.parametrize(
    ("engine", "size"), some([("shm", 2), ("shm", 3), ("tcp", 2), ("tcp", 3)], [("shm", 2), ("tcp", 3)])
)
def test_no_result_is_lost(ranks: Callable[..., RankPool], engine: str, size: int) -> None:
    settings = {"HOROVOD_CPU_OPERATIONS": engine, "HOROVOD_GLOO_TIMEOUT_SECONDS": "3"}
    pool = ranks(size, settings, framework="torch")
    first, *others = pool.run(jobs, size, timeout=300)
    assert first > JOBS and set(others) == {first}
