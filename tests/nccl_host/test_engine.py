"""The engine from the core down to NCCL's own host code, between real processes: process sets, joined ranks, failures, the end.

CUDA's driver is the stand-in of ``tests/stand_in``; NCCL is real, on the runtime of ``cuda.c``. No data moves, so the numbers
that arrive are not looked at: ``tests/parallel/test_device_engine.py`` does that with NCCL's stand-in.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import native_devices
from horovod.common import basics as hvd
from horovod.core.errors import HorovodInternalError
from horovod.core.lifecycle.context import running
from horovod.core.lifecycle.process_set import global_process_set
from horovod.core.requests import devices
from horovod.core.submission import collectives
from host_code import ENV, SIZE
from jobs import Job, make_job
from native_devices import Arrays
from ranks import RankPool


@pytest.fixture
def job(ranks: Callable[..., RankPool]) -> Job:
    return make_job(lambda size: ranks(size, ENV), "horovod.common.basics")


@contextlib.contextmanager
def generation(nccl: str, driver: str, sets: list[list[int]], device: int = -1) -> Iterator[tuple[Any, ...]]:
    """On a rank: a generation in which NCCL serves device memory."""
    hvd.shutdown()
    rank = int(os.environ["HOROVOD_RANK"])
    ctypes.CDLL(nccl).host_code_device(rank if device < 0 else device)
    before = devices.provider()
    with native_devices.loaded(driver, "GPU-0,GPU-1,GPU-2", real_nccl=nccl):
        arrays = Arrays()
        devices.provide(arrays.devices)
        try:
            made = [hvd.ProcessSet(ranks) for ranks in sets]
            hvd.init(process_sets=made)
            assert running().device_engine == "nccl"
            arrays.begin()
            yield arrays, *made
            hvd.shutdown()
        finally:
            devices.provide(before)


def vector(length: int = 100) -> Any:
    return np.ones(length, np.float32)


def barrier() -> None:
    collectives.barrier().wait()


def test_every_operation_and_a_group_of_161(job: Job, nccl: str, stand_in: str) -> None:
    def check() -> None:
        with generation(nccl, stand_in, []) as (arrays,):
            arrays.allreduce([vector(length % 5000 + 1) for length in range(0, 161 * 100, 100)], "group")
            arrays.broadcast(vector(), 1, "root")
            assert arrays.allgather(vector(5 + hvd.rank()), "rows").size == 18
            assert arrays.alltoall(vector(6), [1, 2, 3], "splits").size == 3 * (hvd.rank() + 1)
            assert arrays.reducescatter(vector(7), "part").size == [3, 2, 2][hvd.rank()]
            arrays.allreduce([vector()], "averaged", prescale=0.25, postscale=3.0)
            barrier()

    job(SIZE, check)


def test_process_sets_overlap(job: Job, nccl: str, stand_in: str) -> None:
    """Those that are split from the communicator of all, those that are made before there is one, and dynamic ones."""

    def check(split: bool) -> None:
        with generation(nccl, stand_in, [[0, 1], [1, 2], [0, 2]]) as (arrays, *sets):
            if split:
                arrays.allreduce([vector()], "first")
                barrier()
            mine = [each for each in (*sets, global_process_set) if each.included()]
            order = mine[hvd.rank() % len(mine) :] + mine[: hvd.rank() % len(mine)]
            for turn in range(5):
                pending = [
                    arrays.allreduce_async([vector()], f"x{turn}", process_set=each.process_set_id) for each in order
                ]
                for each in pending:
                    arrays.finish(each)
            barrier()

    for split in (True, False):
        job(SIZE, check, split)


def test_a_rank_that_dies_ends_the_others_with_its_name(job: Job, nccl: str, stand_in: str) -> None:
    def check() -> str:
        with generation(nccl, stand_in, []) as (arrays,):
            arrays.allreduce([vector()], "first")
            barrier()
            if hvd.rank() == 1:
                os._exit(7)
            with pytest.raises(HorovodInternalError) as error:
                for turn in range(1000):
                    arrays.allreduce_async([vector()], f"x{turn}").wait()
                    threading.Event().wait(0.01)
            return str(error.value)

    found = job(SIZE, check, dies=[1])
    assert all("ank 1" in text for text in (found[0], found[2])), found


def test_two_ranks_on_one_device_are_an_error_on_all_ranks(job: Job, nccl: str, stand_in: str) -> None:
    def check() -> str:
        with generation(nccl, stand_in, [], device=0) as (arrays,):
            with pytest.raises(HorovodInternalError) as error:
                arrays.allreduce([vector()], "x")
            return str(error.value)

    for text in job(SIZE, check):
        assert (
            "could not be set up" in text and "Duplicate GPU detected" in text and "HOROVOD_GPU_OPERATIONS=HOST" in text
        )


def test_generations_follow_one_another(job: Job, nccl: str, stand_in: str) -> None:
    def check() -> None:
        for _ in range(3):
            with generation(nccl, stand_in, [[0, 1]]) as (arrays, pair):
                arrays.allreduce([vector()], "x")
                if pair.included():
                    arrays.allreduce([vector()], "x", process_set=pair.process_set_id)
                barrier()

    job(SIZE, check)
