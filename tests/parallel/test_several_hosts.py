"""Ranks that say that they are on several hosts, where the first of each host speaks for the others. It takes no hosts."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from horovod.core import config
from ranks import Death, RankPool

SIZE = 4


@pytest.fixture
def pool(ranks: Callable[..., RankPool]) -> RankPool:
    return ranks(SIZE, {config.DYNAMIC_PROCESS_SETS: "1", config.RELAY_THRESHOLD: "0"}, "torch")


def test_every_operation_with_ranks_that_speak_for_others(pool: RankPool) -> None:
    def job(hosts: str) -> list[Any]:
        import os

        import torch

        import horovod.torch as hvd

        own, before = int(os.environ["HOROVOD_RANK"]), os.environ["HOROVOD_HOSTNAME"]
        os.environ["HOROVOD_HOSTNAME"] = hosts[own]
        try:
            hvd.init()
            seen: list[Any] = []
            rank, size = hvd.rank(), hvd.size()
            pair = hvd.add_process_set([1, 3])
            for step in range(3):
                order = range(10) if rank % 2 else range(9, -1, -1)
                handles = [hvd.allreduce_async(torch.ones(3) * rank, name=f"g{each}", op=hvd.Sum) for each in order]
                seen.append({hvd.synchronize(handle)[0].item() for handle in handles})
                seen.append(hvd.allgather(torch.full((rank + step, 1), rank), name="rows").flatten().tolist())
                splits = torch.tensor([(rank + receiver + step) % 3 for receiver in range(size)], dtype=torch.int32)
                found, received = hvd.alltoall(torch.full((int(splits.sum()),), rank), splits, name="exchanged")
                assert received.tolist() == [(sender + rank + step) % 3 for sender in range(size)]
                assert found.tolist() == [sender for sender in range(size) for _ in range(received[sender])]
                if pair.included():
                    assert hvd.allreduce(torch.tensor(rank), name="pair", op=hvd.Sum, process_set=pair).item() == 4
            with pytest.raises(hvd.HorovodInternalError) as caught:
                hvd.allreduce(torch.ones(2 + (rank == 3)), name="uneven")
            seen.append("ranks 0-2: allreduce" in str(caught.value) and "rank 3: allreduce" in str(caught.value))
            if rank != 3:
                seen += [hvd.allreduce(torch.ones(1), name=f"left {each}", op=hvd.Sum).item() for each in range(2)]
            else:
                seen += [3.0, 3.0]
            hvd.join()
            hvd.barrier()
            hvd.remove_process_set(pair)
            hvd.shutdown()
            return seen
        finally:
            os.environ["HOROVOD_HOSTNAME"] = before

    gathered = [[rank for rank in range(SIZE) for _ in range(rank + step)] for step in range(3)]
    wanted = [each for step in range(3) for each in ({6.0}, gathered[step])] + [True, 3.0, 3.0]
    assert pool.run(job, "aabb") == [wanted] * SIZE
    with pool.leaves_nothing():
        for hosts in ("abbb", "abab", "abac"):
            assert pool.run(job, hosts) == [wanted] * SIZE


@pytest.mark.parametrize("victim", [1, 2])
def test_a_rank_is_lost_that_speaks_for_others_or_is_spoken_for(pool: RankPool, victim: int) -> None:
    def job(victim: int) -> str:
        import os

        import torch

        import horovod.torch as hvd

        own = int(os.environ["HOROVOD_RANK"])
        os.environ["HOROVOD_HOSTNAME"] = "abbb"[own]
        hvd.init()
        try:
            hvd.allreduce(torch.ones(1), name="together")
            if own == victim:
                signal.raise_signal(signal.SIGKILL)
            for step in range(100):
                hvd.allreduce(torch.ones(1), name=f"step{step}")
            return "no error"
        except hvd.HorovodInternalError as error:
            return str(error)
        finally:
            hvd.shutdown()

    results = pool.run(job, victim, dies={victim})
    assert results[victim] == Death(-signal.SIGKILL)
    for rank in set(range(SIZE)) - {victim}:
        assert results[rank].startswith(f"Horovod: rank {victim} "), results[rank]
        assert "its process ended without hvd.shutdown()" in results[rank]
