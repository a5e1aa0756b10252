"""Every operation of torch.distributed on every engine and data type: the results are Gloo's, or those of arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from horovod.core import config
from process_groups import run_in_group
from ranks import RankPool

ENGINES = ["shm", "tcp", "gloo"]
"""Those that a machine without an MPI launcher has; tests/parallel/test_engines.py compares all of them with one another."""

REDUCED = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.int8,
]  # fmt: skip
MOVED = [*REDUCED, torch.bool, torch.complex64, torch.complex128, torch.int16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("engine", ENGINES)
def test_results_are_those_of_gloo(ranks: Callable[..., RankPool], engine: str, size: int) -> None:
    pool = ranks(size, env={config.CPU_OPERATIONS: engine}, framework="torch")
    compared = run_in_group(pool, _compare, REDUCED, MOVED)
    assert all(each == compared[0] for each in compared)
    assert len(compared[0]) > 150 and not [name for name in compared[0] if name.startswith("differs")]


def _compare(reduced: Any, moved: Any) -> list[str]:
    """Runs on a rank: each operation by both back ends. What was compared, and what differs."""
    import torch.distributed as dist
    from torch.distributed import ReduceOp

    own, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    told: list[str] = []

    def values(dtype: Any, count: int, of: int = 0) -> Any:
        made = (torch.arange(count) * 3 + 5 * rank + 7 * of) % 23
        if dtype.itemsize == 1 and dtype.is_floating_point:  # PyTorch converts to them, but hardly computes
            return made.to(torch.float32).to(dtype)
        return (made + 1j * made).to(dtype) if dtype.is_complex else made.to(dtype)

    gloo_moves = set(reduced) - {torch.bfloat16}

    def bits(tensor: Any) -> Any:
        return torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor.reshape(-1).view(torch.uint8)

    def check(name: str, run: Any, dtype: Any, bitwise: bool = True) -> None:
        mine = run(own, dtype)
        try:
            theirs = run(gloo, dtype)
        except (RuntimeError, ValueError) as error:
            told.append(f"{name} {dtype}: Gloo refuses ({type(error).__name__})")
            return
        same = all(
            torch.equal(bits(a), bits(b)) if bitwise else torch.allclose(a.double(), b.double(), rtol=1e-2)
            for a, b in zip(mine, theirs, strict=True)
        )
        told.append(f"{'' if same else 'differs: '}{name} {dtype}" + ("" if same else f" {mine} {theirs}"))

    def all_reduce(op: Any, count: int) -> Any:
        def run(group: Any, dtype: Any) -> list[Any]:
            tensor = values(dtype, count)
            dist.all_reduce(tensor, op, group=group)
            return [tensor]

        return run

    for dtype in reduced:
        exact = not dtype.is_floating_point or dtype.itemsize > 2
        for op in ("SUM", "MIN", "MAX", "PRODUCT"):
            for count in (0, 1, 5, 70_000):
                check(f"all_reduce {op} {count}", all_reduce(getattr(ReduceOp, op), count), dtype, exact)
        if not dtype.is_floating_point:
            for op in ("BAND", "BOR", "BXOR"):
                check(f"all_reduce {op}", all_reduce(getattr(ReduceOp, op), 1000), dtype)

        def reduce(group: Any, dtype: Any) -> list[Any]:
            tensor = values(dtype, 100)
            dist.reduce(tensor, size - 1, group=group)
            return [tensor] if rank == size - 1 else []

        def reduce_scatter(group: Any, dtype: Any) -> list[Any]:
            listed, single = torch.zeros(6, dtype=dtype), torch.zeros(2, 3, dtype=dtype)
            dist.reduce_scatter(listed, [values(dtype, 6, of) for of in range(size)], group=group)
            dist.reduce_scatter_tensor(single, values(dtype, 6 * size).view(-1, 3), group=group)
            return [listed, single]

        check("reduce", reduce, dtype, exact)
        check("reduce_scatter", reduce_scatter, dtype, exact)

    def broadcast(group: Any, dtype: Any) -> list[Any]:
        tensor = values(dtype, 100)
        dist.broadcast(tensor, size - 1, group=group)
        return [tensor]

    def all_gather(group: Any, dtype: Any) -> list[Any]:
        listed = [torch.zeros(7, dtype=dtype) for _ in range(size)]
        dist.all_gather(listed, values(dtype, 7), group=group)
        single = torch.zeros(4 * size, dtype=dtype)
        dist.all_gather_into_tensor(single, values(dtype, 4), group=group)
        return [*listed, single]

    def gather_scatter(group: Any, dtype: Any) -> list[Any]:
        root, there = size - 1, rank == size - 1
        gathered = [torch.zeros(7, dtype=dtype) for _ in range(size)] if there else None
        dist.gather(values(dtype, 7), gathered, root, group=group)
        scattered = torch.zeros(3, dtype=dtype)
        dist.scatter(scattered, [values(dtype, 3, of) for of in range(size)] if there else None, root, group=group)
        return [*(gathered or []), scattered]

    def all_to_all(group: Any, dtype: Any) -> list[Any]:
        even, uneven = (
            torch.zeros(2 * size, dtype=dtype),
            torch.zeros(sum(rank + of for of in range(size)), 2, dtype=dtype),
        )
        dist.all_to_all_single(even, values(dtype, 2 * size), group=group)
        splits = [rank + of for of in range(size)]
        dist.all_to_all_single(uneven, values(dtype, 2 * sum(splits)).view(-1, 2), splits, splits, group=group)
        listed = [torch.zeros(3, dtype=dtype) for _ in range(size)]
        if group is own or dist.get_backend(group) != "gloo":
            dist.all_to_all(listed, [values(dtype, 3, of) for of in range(size)], group=group)
        else:  # Gloo has no such operation
            whole = torch.cat([values(dtype, 3, of) for of in range(size)])
            dist.all_to_all_single(torch.empty_like(whole).copy_(whole), whole, group=group)
            out = torch.empty_like(whole)
            dist.all_to_all_single(out, whole, group=group)
            listed = list(out.chunk(size))
        return [even, uneven, *listed]

    def send_recv(group: Any, dtype: Any) -> list[Any]:
        received = [torch.zeros(count, dtype=dtype) for count in (5, 200_000)]
        works = []
        for tag, tensor in enumerate(received):
            works.append(dist.isend(values(dtype, len(tensor)), (rank + 1) % size, group=group, tag=tag))
            works.append(dist.irecv(tensor, (rank - 1) % size, group=group, tag=tag))
        for work in works:
            work.wait()
        return received

    for dtype in moved:
        for name, run in {
            "broadcast": broadcast,
            "all_gather": all_gather,
            "gather, scatter": gather_scatter,
            "all_to_all": all_to_all,
            "send, recv": send_recv,
        }.items():
            mine = run(own, dtype)
            if dtype in gloo_moves:
                theirs = run(gloo, dtype)
                same = all(torch.equal(bits(a), bits(b)) for a, b in zip(mine, theirs, strict=True))
            else:  # the values are those that the same calls move as another type
                theirs = run(gloo, torch.int64)
                same = all(torch.equal(bits(a), bits(_converted(b, dtype))) for a, b in zip(mine, theirs, strict=True))
            told.append(f"{'' if same else 'differs: '}{name} {dtype}")
    return told


def _converted(numbers: Any, dtype: Any) -> Any:
    if dtype.itemsize == 1 and dtype.is_floating_point:
        return numbers.to(torch.float32).to(dtype)
    return (numbers + 1j * numbers).to(dtype) if dtype.is_complex else numbers.to(dtype)


def test_what_gloo_has_not(ranks: Callable[..., RankPool]) -> None:
    """AVG and PREMUL_SUM, sums of complex numbers and bools, uneven forms."""

    def check() -> None:
        import torch.distributed as dist

        rank, size = dist.get_rank(), dist.get_world_size()
        tensor = torch.tensor([2.0 + rank, 4.0])
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        assert tensor.tolist() == [2.0 + (size - 1) / 2, 4.0]
        tensor = torch.tensor([1.0, 2.0])
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))  # type: ignore[attr-defined]
        assert tensor.tolist() == [0.5 * size, size]
        pair = torch.tensor([1 + 2j * rank])
        dist.all_reduce(pair)
        assert pair.tolist() == [size + 1j * size * (size - 1)]
        some = torch.tensor([rank == 0, False])
        dist.all_reduce(some)
        assert some.tolist() == [True, False]
        gathered = [torch.zeros(of + 1) for of in range(size)]
        dist.all_gather(gathered, torch.full((rank + 1,), float(rank)))
        assert [each.tolist() for each in gathered] == [[float(of)] * (of + 1) for of in range(size)]
        part = torch.zeros(rank + 1)
        dist.reduce_scatter(part, [torch.ones(of + 1) for of in range(size)])
        assert part.tolist() == [float(size)] * (rank + 1)

    run_in_group(ranks(3, framework="torch"), check)


def test_kinds_of_tensors(ranks: Callable[..., RankPool]) -> None:
    """Not contiguous, conjugated, sparse, without dimensions, views of one buffer; outputs that overlap the input."""

    def check() -> None:
        import torch.distributed as dist

        rank, size = dist.get_rank(), dist.get_world_size()
        turned = torch.arange(6.0).view(2, 3).t()
        dist.all_reduce(turned)
        assert turned.tolist() == (torch.arange(6.0).view(2, 3).t() * size).tolist()
        every_other = torch.zeros(6)
        dist.broadcast(every_other[::2].fill_(rank), 1)
        assert every_other.tolist() == [1.0, 0.0] * 3
        scalar = torch.tensor(float(rank))
        dist.all_reduce(scalar)
        assert scalar.item() == size * (size - 1) / 2
        sparse = torch.sparse_coo_tensor([[rank, 5]], [1.0, 2.0], (8,), check_invariants=False)
        dist.all_reduce(sparse)
        dense = sparse.to_dense()
        assert dense[:size].tolist() == [1.0] * size and dense[5].item() == 2.0 * size
        whole = torch.zeros(2 * size)
        mine = whole[2 * rank : 2 * rank + 2].fill_(rank + 1)
        dist.all_gather_into_tensor(whole, mine)
        assert whole.tolist() == [float(of + 1) for of in range(size) for _ in range(2)]
        dist.reduce_scatter_tensor(mine, whole)
        assert mine.tolist() == [size * (rank + 1.0)] * 2
        chunks = list(torch.zeros(size, 4).unbind())
        dist.all_gather(chunks, torch.full((4,), float(rank)))
        assert [chunk.tolist() for chunk in chunks] == [[float(of)] * 4 for of in range(size)]

    run_in_group(ranks(2, framework="torch"), check)


def test_works_and_futures(ranks: Callable[..., RankPool]) -> None:
    def check() -> None:
        import torch.distributed as dist

        size = dist.get_world_size()
        works = [dist.all_reduce(torch.full((1000 * (n + 1),), 1.0), async_op=True) for n in range(10)]
        for work in reversed(works):
            work.wait()
            assert work.is_completed() and work.is_success() and work.exception() is None
            assert work.result()[0][0].item() == size
        gathered = [torch.zeros(3) for _ in range(size)]
        future = dist.all_gather(gathered, torch.ones(3), async_op=True).get_future()
        assert [each.tolist() for each in future.wait()] == [[1.0] * 3] * size

        def again(done: Any) -> Any:
            """Waits for another collective inside of a callback, as PowerSGD does."""
            return dist.all_reduce(done.value()[0], async_op=True).get_future().wait()[0] / size

        chained = [
            dist.all_reduce(torch.ones(2), async_op=True).get_future().then(again).then(lambda done: done.value() + 1)
            for _ in range(6)
        ]
        assert [each.wait().tolist() for each in chained] == [[size + 1.0] * 2] * 6

    run_in_group(ranks(2, framework="torch"), check)


def test_sends_and_receives(ranks: Callable[..., RankPool]) -> None:
    """Tags in any order, any source, several groups, to oneself, more data than a socket holds, and what does not fit."""

    def check() -> None:
        import torch.distributed as dist

        from horovod.torch import HorovodInternalError

        rank, size = dist.get_rank(), dist.get_world_size()
        pair = dist.new_group([0, 1])
        if rank == 0:
            works = [dist.isend(torch.full((2,), float(tag)), 1, tag=tag) for tag in range(5)]
            works += [dist.isend(torch.full((2,), 9.0), 1, group=pair)]
            for work in works:
                work.wait()
        elif rank == 1:
            for tag in (4, 0, 3, 1, 2):
                received = torch.zeros(2)
                assert dist.recv(received, 0, tag=tag) == 0 and received.tolist() == [tag, tag]
            dist.recv(received, 0, group=pair)
            assert received.tolist() == [9.0, 9.0]
        dist.barrier()
        if rank:
            dist.send(torch.full((3,), float(rank)), 0)
        else:
            received, sources = torch.zeros(3), set()
            for _ in range(size - 1):
                source = dist.recv(received)
                assert received.tolist() == [source] * 3
                sources.add(source)
            assert sources == set(range(1, size))
        work, own = dist.isend(torch.ones(2), rank), torch.zeros(2)
        dist.irecv(own, rank).wait()
        work.wait()
        assert own.tolist() == [1.0, 1.0]
        if rank < 2:
            try:
                if rank == 0:
                    dist.send(torch.zeros(100_000), 1)
                else:
                    dist.recv(torch.zeros(50, dtype=torch.int32), 0)
            except HorovodInternalError as error:
                text = str(error)
                assert "rank 0 of the group sent 400000 bytes of float32" in text and "200 bytes of int32" in text
            else:
                raise AssertionError("sizes differ, and nobody was told")
        dist.barrier()

    run_in_group(ranks(3, framework="torch"), check)


def test_messages_that_cannot_be_read_in_place_are_sent(ranks: Callable[..., RankPool]) -> None:
    def check() -> None:
        import torch.distributed as dist

        from horovod.comm.shm import cross_memory

        def forbidden(*_: Any) -> None:
            raise PermissionError("not permitted")

        kept, cross_memory.read = cross_memory.read, forbidden  # type: ignore[assignment]
        try:
            rank = dist.get_rank()
            sent = torch.arange(3_000_000, dtype=torch.float32) * (rank + 1)
            received = torch.zeros(3_000_000)
            for work in [dist.isend(sent, 1 - rank), dist.irecv(received, 1 - rank)]:
                work.wait()
            assert torch.equal(received, torch.arange(3_000_000, dtype=torch.float32) * (2 - rank))
        finally:
            cross_memory.read = kept

    run_in_group(ranks(2, framework="torch"), check)
