"""Hundreds of generations in one process leave nothing behind, neither in the ranks nor at the rendezvous server."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from ranks import RankPool

Ranks = Callable[..., RankPool]
CYCLES = 200
SLACK = 4 << 20
"""Bytes that a process may differ in without having grown: allocators keep what they had."""


def size_of(process: psutil.Process) -> tuple[int, int, int]:
    """Threads, descriptors, bytes in memory."""
    return process.num_threads(), process.num_fds(), process.memory_info().rss


def cycles(count: int) -> tuple[int, int, int]:
    import gc

    import torch

    import horovod.torch as hvd

    for _ in range(count):
        hvd.init()
        handle = hvd.allreduce_async(torch.ones(100_000), name="x", op=hvd.Sum)
        assert hvd.allgather(torch.ones(1)).numel() == hvd.size()
        assert hvd.synchronize(handle)[-1].item() == hvd.size()
        hvd.shutdown()
    gc.collect()
    return size_of(psutil.Process())


def test_two_hundred_generations(ranks: Ranks) -> None:
    pool = ranks(2, framework="torch")
    (rendezvous_point,) = pool.processes() - set(pool.run(os.getpid))
    with pool.leaves_nothing():
        warm = pool.run(cycles, CYCLES // 4)
        before = size_of(psutil.Process(rendezvous_point))
        done = pool.run(cycles, CYCLES - CYCLES // 4)
    for found, earlier in zip([*done, size_of(psutil.Process(rendezvous_point))], [*warm, before], strict=True):
        assert found[:2] == earlier[:2]
        assert found[2] - earlier[2] < SLACK


def test_generations_of_one(ranks: Ranks) -> None:
    pool = ranks(1, framework="torch")
    with pool.leaves_nothing():
        (warm,) = pool.run(cycles, 50)
        (done,) = pool.run(cycles, 100)
    assert done[:2] == warm[:2] and done[2] - warm[2] < SLACK


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_generations_that_end_in_the_middle_of_something(ranks: Ranks, engine: str) -> None:
    """One rank shuts down while collectives are under way or wait; the next generation knows nothing of it."""

    def cut_short() -> None:
        import torch

        import horovod.torch as hvd

        os.environ["HOROVOD_CPU_OPERATIONS"] = engine
        try:
            for turn in range(15):
                hvd.init()
                leaver = turn % 3
                try:
                    handles = [hvd.allreduce_async(torch.ones(200_000), name=f"n{n}", op=hvd.Sum) for n in range(5)]
                    if leaver != hvd.rank():
                        hvd.allreduce_async(torch.ones(5), name="of.the.others")
                        for handle in handles:
                            assert hvd.synchronize(handle)[0].item() == 3.0
                except hvd.HorovodInternalError as error:
                    assert f"caused by rank {leaver}" in str(error)
                hvd.shutdown()
        finally:
            del os.environ["HOROVOD_CPU_OPERATIONS"]

    pool = ranks(3, framework="torch")
    with pool.leaves_nothing():
        pool.run(cut_short)


def test_a_failed_start_can_be_repeated(ranks: Ranks) -> None:
    """A rank that does not come: the error names it, and nothing is left of the attempt."""

    def start(missing: int) -> Any:
        import horovod.torch as hvd

        os.environ["HOROVOD_START_TIMEOUT"] = "1"
        try:
            if os.environ["HOROVOD_RANK"] == str(missing):
                return ""
            with pytest.raises(TimeoutError) as error:
                hvd.init()
            assert not hvd.is_initialized()
            return str(error.value)
        finally:
            del os.environ["HOROVOD_START_TIMEOUT"]

    pool = ranks(3, framework="torch")
    with pool.leaves_nothing():
        for missing in (2, 0):
            texts = pool.run(start, missing)
            for rank in {0, 1, 2} - {missing}:
                assert f"rank {missing} of 3 did not call hvd.init() within 1 seconds" in texts[rank]
        pool.run(cycles, 1)


def test_ranks_with_different_settings_are_told_so_and_may_try_again(ranks: Ranks) -> None:
    def try_twice() -> str:
        import torch

        import horovod.torch as hvd

        if os.environ["HOROVOD_RANK"] == "1":
            os.environ["HOROVOD_CACHE_CAPACITY"] = "16"
        try:
            hvd.init()
        except ValueError as error:
            return str(error)
        finally:
            os.environ.pop("HOROVOD_CACHE_CAPACITY", None)
            hvd.init()
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3.0
            hvd.shutdown()
        return "no error"

    pool = ranks(3, framework="torch")
    with pool.leaves_nothing():
        texts = set(pool.run(try_twice))
    assert len(texts) == 1
    assert "HOROVOD_CACHE_CAPACITY is 1024 on ranks 0, 2, 16 on rank 1" in texts.pop()
