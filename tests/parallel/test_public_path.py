"""The whole way from ``horovod.torch`` through negotiation to an engine that was forced, at every size up to eight."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from ranks import Pools, RankPool

Ranks = Callable[..., RankPool]


def generation(env: Mapping[str, str], function: Callable[..., Any], *arguments: Any) -> Any:
    """One ``init()`` to ``shutdown()`` with these settings."""
    import os

    before = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        hvd.init()
        return function(*arguments)
    finally:
        hvd.shutdown()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def force(engine: str) -> dict[str, str]:
    return {"HOROVOD_CPU_OPERATIONS": engine}


def engine_in_use() -> str:
    from horovod.core.lifecycle import context

    return context.current().workers[0].communicator.name


def handful() -> tuple[str, bytes]:
    """A few of everything; the engine, and a digest of all results that must be the same on all ranks."""
    rank, size = hvd.rank(), hvd.size()
    digest = hashlib.sha256()

    def note(result: torch.Tensor) -> None:
        digest.update(result.contiguous().view(torch.uint8).numpy().tobytes())

    generator = torch.Generator().manual_seed(rank)
    for count in (1, 257, 100_003):
        noise = torch.rand(count, generator=generator)
        for dtype in (torch.float32, torch.bfloat16):
            note(hvd.allreduce(noise.to(dtype)))
        assert hvd.allreduce(torch.full((count,), rank + 1), op=hvd.Sum)[-1].item() == size * (size + 1) // 2
    handles = [hvd.allreduce_async(torch.full((n,), 1.0), name=f"n{n}", op=hvd.Sum) for n in range(50)]
    assert all(bool((hvd.synchronize(handle) == size).all()) for handle in handles)
    for result in hvd.grouped_allreduce([torch.ones(3), torch.ones(2, dtype=torch.float64)], op=hvd.Sum):
        assert result[0].item() == size
    gathered = hvd.allgather(torch.full((rank + 1, 2), rank))
    assert gathered[:, 0].tolist() == [r for r in range(size) for _ in range(r + 1)]
    for root in {0, size // 2, size - 1}:
        assert hvd.broadcast(torch.full((70_000,), rank), root)[-1].item() == root
    output, received = hvd.alltoall(torch.full((size * 3,), rank), [3] * size)
    assert output.tolist() == [r for r in range(size) for _ in range(3)] and received.tolist() == [3] * size
    mine = hvd.reducescatter(torch.arange(2.0 * size + 1), op=hvd.Sum)
    assert mine[0].item() == (0 if rank == 0 else 2 * rank + 1) * size
    hvd.barrier()
    assert hvd.allgather_object((rank, "x" * rank)) == [(r, "x" * r) for r in range(size)]
    return engine_in_use(), digest.digest()


def test_engines_that_were_forced_at_every_size(pools: Pools) -> None:
    """A smaller job is made of the first ranks of a larger one, so that eight processes are started once."""
    pool = RankPool(8, framework="torch", templates=pools.templates)
    try:
        for size in range(8, 0, -1):  # downwards: the ranks of a job must have had as many generations as one another
            job = {"HOROVOD_SIZE": str(size), "HOROVOD_LOCAL_SIZE": str(size)}
            results = {
                engine: pool.run(generation, {**job, **force(engine)}, handful, ranks=range(size))
                for engine in ("shm", "tcp")
            }
            for engine, found in results.items():
                assert {name for name, _ in found} == {engine if size > 1 else "single"}
            digests = {digest for found in results.values() for _, digest in found}
            assert len(digests) == 1, f"{size} ranks: either engine must give the same bits on all"
    finally:
        pool.close()


def test_what_is_chosen(ranks: Ranks) -> None:
    pool = ranks(2, framework="torch")
    assert pool.run(generation, {}, engine_in_use) == ["shm", "shm"]


def test_half_a_gibibyte(ranks: Ranks) -> None:
    """Far more than fits into any stage of the engine, and not a multiple of one."""

    def much() -> None:
        period = torch.arange(251, dtype=torch.uint8).repeat(1 << 18)
        count = (1 << 29) + 12345
        tensor = period.repeat(count // period.numel() + 1)[:count]
        tensor += hvd.rank()  # 0 to 250, and 1 to 251: sums wrap around at 256
        assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
        wanted = period * 2 + 1
        for part in tensor.split(period.numel()):
            assert torch.equal(part, wanted[: part.numel()])
        bytes_from_one = tensor if hvd.rank() else tensor.zero_()
        assert hvd.broadcast_(bytes_from_one, 1) is tensor
        for part in tensor.split(period.numel()):
            assert torch.equal(part, wanted[: part.numel()])

    pool = ranks(2, framework="torch")
    pool.run(generation, force("shm"), much)


def test_an_engine_that_does_not_exist(ranks: Ranks) -> None:
    def refused() -> str:
        with pytest.raises(RuntimeError) as error:
            generation({"HOROVOD_CPU_OPERATIONS": "carrier-pigeon"}, lambda: None)
        assert not hvd.is_initialized()
        return str(error.value)

    for size in (1, 2):
        pool = ranks(size, framework="torch")
        with pool.leaves_nothing():
            for text in pool.run(refused):
                assert "HOROVOD_CPU_OPERATIONS=carrier-pigeon" in text and "use shm, " in text
            pool.run(generation, {}, lambda: hvd.barrier())  # and then it can be right


def test_ranks_that_ask_for_different_engines(ranks: Ranks) -> None:
    def refused() -> str:
        import os

        with pytest.raises(RuntimeError) as error:
            generation(force("shm" if os.environ["HOROVOD_RANK"] == "0" else "tcp"), lambda: None)
        return str(error.value)

    pool = ranks(3, framework="torch")
    with pool.leaves_nothing():
        for text in pool.run(refused):
            assert "different engines with HOROVOD_CPU_OPERATIONS: shm on rank 0, tcp on rank 1" in text
        pool.run(generation, {}, lambda: hvd.barrier())


def test_one_rank_alone_asks_for_an_engine_that_does_not_exist(ranks: Ranks) -> None:
    def refused() -> str:
        import os

        engine = "carrier-pigeon" if os.environ["HOROVOD_RANK"] == "1" else "shm"
        with pytest.raises((RuntimeError, OSError)) as error:
            generation({**force(engine), "HOROVOD_START_TIMEOUT": "10"}, lambda: None)
        return str(error.value)

    pool = ranks(2, framework="torch")
    with pool.leaves_nothing():
        texts = pool.run(refused)
        assert all("carrier-pigeon" in text for text in texts), texts
        pool.run(generation, {}, lambda: hvd.barrier())
