"""Ranks that say that they are on several hosts, where the first of each host speaks for the others. It takes no hosts."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from horovod._base import config
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


def sockets_of_a_job(hosts: str) -> list[int]:
    """How many sockets this rank has after ``init()``, after collectives in steps, and after those of all ranks."""
    import os
    from pathlib import Path

    import torch

    import horovod.torch as hvd

    def sockets() -> int:
        links = [each.readlink() for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
        return sum(str(link).startswith("socket:") for link in links)

    own, before = int(os.environ["HOROVOD_RANK"]), os.environ["HOROVOD_HOSTNAME"]
    os.environ["HOROVOD_HOSTNAME"] = hosts[own]
    counts = [sockets()]
    try:
        hvd.init()
        rank, size = hvd.rank(), hvd.size()
        counts.append(sockets())
        for step in range(2):
            assert hvd.allreduce(torch.ones(1000), op=hvd.Sum).unique().tolist() == [size]
            assert hvd.allgather(torch.full((rank + 1,), rank)).tolist() == [
                each for each in range(size) for _ in range(each + 1)
            ]
            assert hvd.broadcast(torch.tensor([rank + step]), 4).tolist() == [4 + step]
            hvd.barrier()
        counts.append(sockets())
        for _ in range(2):
            assert hvd.alltoall(torch.arange(size)).tolist() == [rank] * size
            found = hvd.reducescatter(torch.arange(size * 2.0), op=hvd.Sum)
            assert found.tolist() == [size * 2.0 * rank, size * (2.0 * rank + 1)]
            counts.append(sockets())
        hvd.barrier()  # until all have counted: a rank that leaves closes its connections
        hvd.shutdown()
        counts.append(sockets())
        return [each - counts[0] for each in counts[1:]]
    finally:
        os.environ["HOROVOD_HOSTNAME"] = before


def test_all_ranks_are_connected_with_each_other_at_the_first_collective_that_needs_it(
    ranks: Callable[..., RankPool],
) -> None:
    pool = ranks(6, {}, "torch")
    with pool.leaves_nothing():
        for rank, counts in enumerate(pool.run(sockets_of_a_job, "aaabbb")):
            begun, in_steps, with_all, again, ended = counts
            if rank:  # one each for control and liveness, and one with the rank of its column
                assert begun == 3, (rank, counts)
            assert (in_steps, with_all, again, ended) == (begun, begun + 5, begun + 5, 0), (rank, counts)


def test_a_rank_is_lost_while_all_connect_with_each_other(ranks: Callable[..., RankPool]) -> None:
    """The others wait for its connection, in the middle of a collective."""

    def job() -> str:
        import os

        import torch

        import horovod.torch as hvd
        from horovod.control.mesh import Mesh

        own = int(os.environ["HOROVOD_RANK"])
        os.environ["HOROVOD_HOSTNAME"] = "aabb"[own]
        hvd.init()
        if own == 1:
            Mesh.connect = lambda *_: signal.raise_signal(signal.SIGKILL)  # type: ignore[method-assign, assignment]
        try:
            hvd.alltoall(torch.arange(4))
            return "no error"
        except hvd.HorovodInternalError as error:
            return str(error)
        finally:
            hvd.shutdown()

    results = ranks(SIZE, {}, "torch").run(job, dies={1})
    assert results[1] == Death(-signal.SIGKILL)
    for rank in (0, 2, 3):
        assert results[rank].startswith("Horovod: rank 1 ") and "its process ended" in results[rank], results[rank]


def test_a_rank_that_cannot_open_the_connections_says_so_on_all_ranks(ranks: Callable[..., RankPool]) -> None:
    def job() -> str:
        import os

        import torch

        import horovod.torch as hvd
        from horovod.control import mesh
        from horovod.control.fd_limit import DescriptorLimitError

        def no_room(connections: int, purpose: str) -> None:
            raise DescriptorLimitError(f"{purpose} needs {connections} connections: raise the hard limit")

        own = int(os.environ["HOROVOD_RANK"])
        with pytest.MonkeyPatch.context() as patch:  # other tests use this process after this one
            patch.setenv("HOROVOD_HOSTNAME", "aabb"[own])
            hvd.init()
            if own == 2:
                patch.setattr(mesh, "make_room", no_room)
            try:
                hvd.alltoall(torch.arange(4))
                return "no error"
            except hvd.HorovodInternalError as error:
                return str(error)
            finally:
                hvd.shutdown()

    for text in ranks(SIZE, {}, "torch").run(job):
        assert text.startswith("Horovod: rank 2 "), text
        assert "it could not connect to the other ranks: rank 2 needs 3 connections: raise the hard limit" in text


def test_an_object_that_is_changed_between_hosts_is_refused_and_not_decoded(pool: RankPool) -> None:
    def job(kind: str) -> list[str]:
        import os

        import horovod.torch as hvd
        from horovod.core.submission import collectives

        own, before = int(os.environ["HOROVOD_RANK"]), os.environ["HOROVOD_HOSTNAME"]
        os.environ["HOROVOD_HOSTNAME"] = "aabb"[own]
        broadcast, kept, seen = collectives.broadcast, [], []

        def on_the_way(what: str, name: str, tensors: Any, *arguments: Any, **options: Any) -> Any:
            """A network that changes the object of one call on its way to rank 2, or sends that of an earlier call again."""
            broadcast(what, name, tensors, *arguments, **options).wait()
            if name.endswith(".t") and hvd.rank() == 2:
                data = tensors[0].array
                kept.append(data.copy())
                if len(kept) == 2:
                    data[:] = kept[0] if kind == "repeat" else data ^ (kind == "change")
            return SimpleNamespace(wait=lambda: None)

        collectives.broadcast = on_the_way
        try:
            hvd.init()
            for call in range(3):
                try:
                    seen.append(str(hvd.broadcast_object(f"object {call}", root_rank=1, name="x")))
                except hvd.HorovodInternalError as error:
                    seen.append(str(error))
            seen.append(str(hvd.allgather_object(hvd.rank())))
            hvd.shutdown()
            return seen
        finally:
            collectives.broadcast = broadcast
            os.environ["HOROVOD_HOSTNAME"] = before

    well = ["object 0", "object 1", "object 2", "[0, 1, 2, 3]"]
    assert pool.run(job, "nothing") == [well] * SIZE
    for kind in ("change", "repeat"):
        found = pool.run(job, kind)
        refused = found[2].pop(1)
        assert (
            "the object of rank 1 for broadcast_object 'x' is not what that rank sent" in refused
            and "rank 2" in refused
        )
        assert found == [well, well, [well[0], *well[2:]], well]
