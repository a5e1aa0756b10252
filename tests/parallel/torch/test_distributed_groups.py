"""Process groups of the back end from their beginning to their end, beside hvd.* in one process, and what is wrong is told."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from horovod._base import config
from horovod.torch.distributed.c10d_backend import AVAILABLE as WITH_BACKENDS
from process_groups import run_in_group, start_in_group
from ranks import RankPool
from time_limits import SOON
from torch_versions import needs_torch

Ranks = Callable[..., RankPool]

needs_backends = needs_torch("2.15", "back ends in Python")


def test_a_group_needs_nothing_but_its_store_and_leaves_nothing(ranks: Ranks) -> None:
    def check() -> None:
        import torch.distributed as dist

        import horovod.torch as hvd

        rank, size = dist.get_rank(), dist.get_world_size()
        assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (rank, size, rank, size)
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).get_future().wait()
        for work in [dist.isend(tensor, (rank + 1) % size), dist.irecv(torch.zeros(3), (rank - 1) % size)]:
            work.wait()
        dist.destroy_process_group(dist.new_group(list(range(size))))
        dist.destroy_process_group()
        assert not hvd.is_initialized()

    pool = ranks(3, framework="torch")
    run_in_group(pool, check, by_store=True)
    with pool.leaves_nothing():
        for _ in range(2):
            run_in_group(pool, check, by_store=True)
            run_in_group(pool, check)


@pytest.mark.parametrize("by_store", [False, True])
@pytest.mark.parametrize("first", ["hvd", "dist"])
def test_hvd_and_dist_share_the_runtime(ranks: Ranks, first: str, by_store: bool) -> None:
    """In either order; and the runtime that the script has asked for outlives the group."""

    def check(first: str, launched: list[dict[str, str]]) -> None:
        import torch.distributed as dist

        import horovod.torch as hvd

        rank, size = dist.get_rank(), dist.get_world_size()
        if first == "hvd":  # destroy the group, and make it again with Horovod running
            store = dist.distributed_c10d._get_default_store()
            dist.destroy_process_group()
            os.environ.update(launched[rank])
            hvd.init()
            dist.init_process_group("horovod", store=store, rank=rank, world_size=size)
        else:
            hvd.init()
        for turn in range(3):
            assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [size, size]
            handle = hvd.allreduce_async(torch.full((2,), float(turn)), name="x")
            work = dist.all_reduce(one := torch.ones(4), async_op=True)
            assert hvd.synchronize(handle).tolist() == [turn, turn]
            work.wait()
            assert one.tolist() == [size] * 4
        dist.destroy_process_group()
        assert hvd.is_initialized() and hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
        hvd.shutdown()

    def variables() -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if "HOROVOD" in name}

    pool = ranks(2, framework="torch")
    run_in_group(pool, check, first, pool.run(variables), by_store=by_store)


def test_groups_of_some_ranks(ranks: Ranks) -> None:
    """Several at once, of one rank and of all, in their own order of calls; one that is destroyed says so."""

    def check() -> None:
        import torch.distributed as dist

        from horovod.torch import HorovodInternalError

        rank = dist.get_rank()
        pairs = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([2, 0])]
        alone = [dist.new_group([of]) for of in range(3)][rank]
        every = dist.new_group()
        mine = [group for group in pairs if group is not dist.GroupMember.NON_GROUP_MEMBER]
        works = []
        for group in mine if rank % 2 else mine[::-1]:
            tensor = torch.full((1000,), float(rank))
            works.append((dist.all_reduce(tensor, group=group, async_op=True), tensor, group))
        for work, tensor, group in works:
            work.wait()
            assert tensor[0].item() == sum(dist.get_process_group_ranks(group))
        single, whole = torch.ones(2), torch.ones(2)
        dist.all_reduce(single, group=alone)
        dist.all_reduce(whole, group=every)
        assert single.tolist() == [1.0, 1.0] and whole.tolist() == [3.0, 3.0]
        low = torch.tensor([float(rank)])
        for group in mine:
            dist.broadcast(low, max(dist.get_process_group_ranks(group)), group=group)
        dist.destroy_process_group(every)
        try:
            every.allreduce([torch.ones(1)])
        except (HorovodInternalError, ValueError):
            pass
        else:
            raise AssertionError("a group that was destroyed took a call")
        dist.barrier()

    run_in_group(ranks(3, framework="torch"), check)


def test_init_again_and_again(ranks: Ranks) -> None:
    def check() -> None:
        import torch.distributed as dist

        rank, size = dist.get_rank(), dist.get_world_size()
        store = dist.distributed_c10d._get_default_store()
        for turn in range(3):
            dist.destroy_process_group()
            dist.init_process_group("horovod", store=store, rank=rank, world_size=size)
            tensor = torch.full((2,), float(turn))
            dist.all_reduce(tensor)
            assert tensor.tolist() == [size * turn] * 2
            received = torch.zeros(1)
            dist.send(torch.ones(1), 1) if rank == 0 else dist.recv(received, 0)
            group = dist.new_group([0, 1])
            dist.barrier(group)

    run_in_group(ranks(2, framework="torch"), check, by_store=True)


def test_a_missing_rank_is_named(ranks: Ranks) -> None:
    """At the beginning, in a group of some, in monitored_barrier()."""

    def alone(path: str) -> str:
        from datetime import timedelta

        import torch.distributed as dist

        import horovod.torch  # noqa: F401

        try:
            dist.init_process_group(
                "horovod", store=dist.FileStore(path, 2), rank=0, world_size=2, timeout=timedelta(seconds=1)
            )
        except TimeoutError as error:
            return str(error)
        finally:
            dist.distributed_c10d._world.group_count = (
                0  # PyTorch would take another name for the next group here alone
            )
        return "no error"

    def check() -> None:
        from datetime import timedelta

        import torch.distributed as dist

        rank = dist.get_rank()
        if rank == 0:
            world: Any = dist.group.WORLD
            for call in (
                lambda: world.monitored_barrier(timedelta(seconds=0.5)),
                lambda: world.monitored_barrier(timedelta(0)),
                lambda: world.monitored_barrier(0.5),
                lambda: dist.new_group([0, 1], timeout=timedelta(seconds=0.5)),
            ):
                try:
                    call()
                except TimeoutError as error:
                    assert "rank 1 of 2 did not call" in str(error), error
                    assert isinstance(error, RuntimeError) == ("monitored_barrier" in str(error))
                else:
                    raise AssertionError("nobody is missing")
            dist.distributed_c10d._get_default_store().set("told", "")
        else:
            dist.distributed_c10d._get_default_store().wait(["told"])  # the others would be told that it has left

    pool = ranks(2, framework="torch")
    with tempfile.TemporaryDirectory() as folder:
        (told,) = pool.run(alone, f"{folder}/store", ranks=[0])
    assert 'rank 1 of 2 did not call torch.distributed.init_process_group("horovod") within 1 seconds' in told
    run_in_group(pool, check)


def test_ranks_that_contradict_each_other_are_told(ranks: Ranks) -> None:
    """Horovod runs on some ranks only, or with other numbers: all raise the same, and nothing has begun."""

    def check(path: str, how: str) -> str:
        import os

        import torch.distributed as dist

        import horovod.torch as hvd
        from horovod._base import config

        rank = int(os.environ[config.RANK])
        hvd.init()
        if how == "numbers":
            rank = 1 - rank
        elif rank == 0:
            hvd.shutdown()
        try:
            dist.init_process_group("horovod", store=dist.FileStore(path, 2), rank=rank, world_size=2)
        except ValueError as error:
            return str(error)
        finally:
            hvd.shutdown()
        return "no error"

    pool = ranks(2, framework="torch")
    for how, expected in (
        ("numbers", "rank 0 of the group is rank 1 of the running Horovod"),
        ("some", "Horovod runs on rank 1 and does not on rank 0"),
    ):
        with tempfile.TemporaryDirectory() as folder:
            told = pool.run(check, f"{folder}/store", how)
        assert all(expected in each for each in told), told


def test_calls_that_do_not_fit_are_told_with_their_lines(ranks: Ranks) -> None:
    """Other shapes, types and operations, also inside of DDP's backward pass; the group can be used afterwards."""

    def check() -> list[str]:
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        rank, one = dist.get_rank(), lambda: torch.ones(5)
        told = []
        trained = DistributedDataParallel(torch.nn.Linear(8, 8))
        for _ in range(3):
            trained(torch.ones(2, 8)).sum().backward()
        calls: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
            (lambda: dist.all_reduce(torch.ones(50)), lambda: dist.all_reduce(torch.ones(100))),
            (lambda: dist.all_reduce(torch.ones(5)), lambda: dist.broadcast(torch.ones(5), 0)),
            (lambda: dist.barrier(), lambda: dist.all_reduce(torch.ones(5, dtype=torch.int32))),
            (lambda: dist.broadcast(torch.ones(5), 0), lambda: dist.broadcast(torch.ones(5), 1)),
            (lambda: dist.gather(one(), [one(), one()], 0), lambda: dist.gather(one(), [one(), one()], 1)),
            (lambda: trained(torch.ones(2, 8)).sum().backward(), lambda: dist.all_reduce(torch.ones(100))),
        ]  # fmt: skip
        for pair in calls:
            try:
                pair[rank]()
            except RuntimeError as error:
                told.append(str(error))
            else:
                told.append("no error")
        dist.all_reduce(last := torch.ones(1))
        assert last.item() == 2.0
        return told

    told = run_in_group(ranks(2, framework="torch"), check)
    for each in told:
        shapes, operations, barrier, root, gathered, inside = each
        assert "[50]" in shapes and "[100]" in shapes and shapes.count("test_distributed_groups.py:") == 2, shapes
        assert "One rank did an ALLREDUCE, but another rank did an BROADCAST" in operations, operations
        assert "One rank did an BARRIER, but another rank did an ALLREDUCE" in barrier, barrier
        assert "Mismatched BROADCAST root ranks" in root and "Mismatched ALLTOALL root ranks" in gathered
        assert (
            ("[72]" in inside or "[8], float32 [64]" in inside)
            and "[100]" in inside
            and inside.count("test_distributed_groups.py:") >= 2
        ), inside


def test_a_call_that_a_rank_never_makes_ends_by_the_time_limit(ranks: Ranks) -> None:
    def check() -> str:
        from datetime import timedelta

        import torch.distributed as dist

        from horovod.core.errors import CollectiveTimeoutError

        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 1:
            store.wait(["told"])
            return "waited"
        work = dist.all_reduce(torch.ones(5), async_op=True)
        try:
            work.wait(timedelta(seconds=0.1))
        except CollectiveTimeoutError as error:
            assert "was not done within 0.1 seconds" in str(error)
        try:
            work.wait()
        except CollectiveTimeoutError as error:
            return str(error)
        finally:
            store.set("told", "")
        return "no error"

    told, _ = run_in_group(ranks(2, framework="torch"), check, timeout=1.5)
    assert "rank 1" in told and "test_distributed_groups.py" in told, told


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("where", ["ddp", "recv", "send"])
def test_a_lost_rank_is_named(ranks: Ranks, how: signal.Signals, where: str) -> None:
    def check(where: str) -> str:
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        rank = dist.get_rank()
        dist.all_reduce(torch.ones(1))
        received = torch.zeros(1_000_000)
        if where != "ddp":  # the connections are there
            dist.send(received, 1 - rank) if rank == 0 else dist.recv(received, 1 - rank)
            dist.recv(received, 1 - rank) if rank == 0 else dist.send(received, 1 - rank)
        trained = DistributedDataParallel(torch.nn.Linear(8, 8))
        print("ready", flush=True)
        try:
            for _ in range(1_000_000):
                if where == "ddp":
                    trained(torch.ones(2, 8)).sum().backward()
                elif rank == 1:
                    time.sleep(100)
                elif where == "recv":
                    dist.recv(received, 1)
                else:
                    dist.send(received, 1)
        except RuntimeError as error:
            print("told", flush=True)
            return str(error)
        return "no error"

    def await_word(word: str, of: list[int]) -> None:
        deadline = time.monotonic() + SOON
        while not all(word in pool.output(rank) for rank in of):
            assert time.monotonic() < deadline, [pool.output(rank) for rank in of]
            time.sleep(0.02)

    pool = ranks(2, env={config.TIMEOUT_SECONDS: "3"}, framework="torch")
    call = start_in_group(pool, check, where)
    await_word("ready", [0, 1])
    pool.kill(1, how)
    if how is signal.SIGSTOP:
        await_word("told", [0])
        pool.kill(1, signal.SIGKILL)
    told, _ = call.results(SOON, dies={1})
    assert "rank 1" in told and ("killed" in told or "stopped" in told), told


@needs_torch("2.7", "_abort_process_group() of groups in Python")
def test_abort_ends_what_is_in_flight_on_all_ranks(ranks: Ranks) -> None:
    def check() -> str:
        import torch.distributed as dist

        from horovod.torch import HorovodInternalError

        rank = dist.get_rank()
        part = dist.new_group([0, 1])
        store = dist.distributed_c10d._get_default_store()
        for name, group in (("part", part), ("all", None)):
            if rank == 0:
                work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
                store.set(name, "submitted")
                try:
                    work.wait()
                except HorovodInternalError as error:
                    told = str(error)
                    assert "rank 1" in told and "aborted the process group" in told, told
            else:
                store.wait([name])
                dist.distributed_c10d._abort_process_group(group)
        return "told"

    run_in_group(ranks(2, framework="torch"), check)


def test_a_backend_takes_the_same_calls_as_a_group(ranks: Ranks) -> None:
    """Before 2.15 PyTorch's Backend cannot be derived from, so a plain class stands for it."""

    def check() -> None:
        import importlib
        from datetime import timedelta
        from types import SimpleNamespace

        import torch.distributed as dist

        from horovod.torch.distributed import c10d_backend, membership
        from horovod.torch.distributed.submission import Submitter

        class Base:
            def __init__(self, rank: int, size: int) -> None:
                self.rank_and_size = rank, size

        rank, size = dist.get_rank(), dist.get_world_size()
        own: Any = dist.group.WORLD
        c10d: Any = torch._C._distributed_c10d
        original, c10d.Backend = c10d.Backend, Base
        try:
            made = importlib.reload(c10d_backend)
            assert made.AVAILABLE
            options = SimpleNamespace(
                store=own.get_group_store(), group_rank=rank, group_size=size, timeout=timedelta(seconds=30)
            )
            found = membership.of_some_ranks(
                dist.PrefixStore("other", options.store), rank, size, list(range(size)), options.timeout, "all"
            )
            group = made.HorovodBackend(options, Submitter(found, 30.0, names_callbacks=False))
            assert group.rank_and_size == (rank, size) and group.name() == "horovod"
            tensor, gathered = torch.ones(3), torch.zeros(3 * size)
            group.allreduce([tensor], dist.distributed_c10d.AllreduceOptions()).wait()
            group.all_gather_single(gathered, tensor, c10d.AllgatherOptions()).wait()
            assert gathered.tolist() == [float(size)] * 3 * size
            group.monitored_barrier(timedelta(seconds=20))
            with pytest.raises(NotImplementedError, match="Name the source"):
                group.recv_anysource([tensor])
            group.shutdown()
        finally:
            c10d.Backend = original
            importlib.reload(c10d_backend)

    run_in_group(ranks(2, framework="torch"), check)


@pytest.mark.skipif(WITH_BACKENDS, reason="PyTorch 2.15 can have several")
def test_several_back_ends_in_one_group_are_refused_where_pytorch_would_leave_one_out(ranks: Ranks) -> None:
    def check() -> None:
        import torch.distributed as dist

        for backends in ("cpu:horovod,cuda:gloo", "cpu:gloo,cuda:horovod"):
            try:
                dist.new_group(backend=backends)
            except ValueError as error:
                assert f'backend="{backends}"' in str(error) and "PyTorch 2.15" in str(error)
                dist.barrier()  # the error holds a group of Gloo, which the other rank may still be connecting to
            else:
                raise AssertionError("one of the two was left out")

    run_in_group(ranks(2, framework="torch"), check)


@needs_backends
def test_one_of_several_back_ends_of_a_group_gives_the_results_of_gloo(ranks: Ranks) -> None:
    def check() -> list[str]:
        from beside_gloo import compare

        return compare("cpu:horovod,cuda:gloo", all_types=False)

    compared = run_in_group(ranks(2, framework="torch"), check)
    assert compared[0] == compared[1] and len(compared[0]) > 60
    assert not [name for name in compared[0] if name.startswith("differs")], compared[0]


@needs_backends
def test_one_of_several_back_ends_trains_and_refuses_what_it_cannot_tell(ranks: Ranks) -> None:
    def check() -> list[list[float]]:
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        rank = dist.get_rank()
        mixed = dist.new_group(backend="cpu:horovod,cuda:gloo")
        found = []
        for group in (mixed, None):
            torch.manual_seed(1)
            trained = DistributedDataParallel(torch.nn.Linear(8, 8), process_group=group)
            trained(torch.ones(2, 8) * rank).square().sum().backward()
            found.append([x for p in trained.parameters() for x in p.grad.flatten().tolist()])  # type: ignore[union-attr]
        with pytest.raises(NotImplementedError, match="Name the source"):
            dist.recv(torch.zeros(1), group=mixed)

        def again(done: Any) -> None:
            dist.all_reduce(done.value()[0], group=mixed)

        if rank == 0:  # the collective waits for rank 1, so the callback is there when it is done
            work = dist.all_reduce(torch.ones(1), group=mixed, async_op=True)
            chained = work.get_future().then(again)
            dist.barrier()
            with pytest.raises(RuntimeError, match="a callback of a future calls a collective"):
                chained.wait()
        else:
            dist.barrier()
            dist.all_reduce(torch.ones(1), group=mixed)
        return found

    first, second = run_in_group(ranks(2, framework="torch"), check)
    assert first[0] == first[1] == second[0]


@needs_backends
def test_monitored_barrier_and_split_group_of_pytorch(ranks: Ranks) -> None:
    def check() -> None:
        from datetime import timedelta

        import torch.distributed as dist

        rank = dist.get_rank()
        dist.monitored_barrier(timeout=timedelta(seconds=30))
        mixed = dist.new_group(backend="cpu:horovod,cuda:gloo")
        dist.monitored_barrier(mixed, timeout=timedelta(seconds=30))
        for members, parent in (([[0, 2], [1]], None), ([[2, 1]], None), ([[0, 2], [1]], mixed)):
            part = dist.split_group(parent, members)
            mine = next((each for each in members if rank in each), None)
            if mine is None:
                assert part is dist.GroupMember.NON_GROUP_MEMBER
                continue
            total = torch.tensor([float(rank)])
            dist.all_reduce(total, group=part)
            assert total.item() == sum(mine) and dist.get_process_group_ranks(part) == mine
        dist.barrier()

    run_in_group(ranks(3, framework="torch"), check)


@needs_torch("2.4", "split_group()")
@pytest.mark.skipif(WITH_BACKENDS, reason="PyTorch 2.15 splits groups on CPUs")
def test_split_group_is_an_error_where_pytorch_wants_an_accelerator(ranks: Ranks) -> None:
    def check() -> None:
        import torch.distributed as dist

        with pytest.raises(RuntimeError, match="split"):
            dist.split_group(split_ranks=[[0], [1]])
        dist.barrier()

    run_in_group(ranks(2, framework="torch"), check)


@pytest.mark.parametrize("later", [0, 1])
@pytest.mark.parametrize("of_some", [False, True])
def test_a_rank_with_one_more_call_is_told_when_it_ends(ranks: Ranks, later: int, of_some: bool) -> None:
    """Also if nothing has waited for that call, and whichever rank leaves first."""

    def check(later: int, of_some: bool) -> list[str]:
        import warnings

        import torch.distributed as dist

        rank = dist.get_rank()
        group = dist.new_group([0, 1]) if of_some else dist.group.WORLD
        for _ in range(3):
            dist.all_reduce(torch.ones(3), group=group)
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            dist.all_reduce(torch.ones(3), group=group, async_op=True)
            store.set("called", "")
        store.wait(["called"])  # else rank 1 may have left before the call
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if rank == later:
                store.wait(["left"])
            if of_some:
                dist.destroy_process_group(group)
            else:
                store.set("left", "")
            if of_some and rank != later:
                store.set("left", "")
            dist.destroy_process_group()
        return [str(each.message) for each in caught if "different numbers" in str(each.message)]

    (text,) = [each for said in run_in_group(ranks(2, framework="torch"), check, later, of_some) for each in said]
    assert "different numbers of calls of the process group made at " in text and ".py:" in text
    assert "4" in text and "3" in text and "on rank 0" in text and "join()" in text, text


def test_a_rank_with_fewer_steps_of_ddp_is_named_with_its_calls(ranks: Ranks) -> None:
    def check() -> str:
        import torch.distributed as dist

        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        try:
            for _ in range(4 - dist.get_rank()):
                model(torch.ones(1, 2)).sum().backward()
        except RuntimeError as error:
            return str(error)
        dist.destroy_process_group()
        return ""

    waited, left = run_in_group(ranks(2, framework="torch"), check)
    assert not left and "rank 1: it left the job" in waited and " calls of the process group made at " in waited, waited


def test_the_profiler_shows_collectives_and_messages(ranks: Ranks) -> None:
    def check() -> dict[str, Any]:
        import torch.distributed as dist
        from torch.profiler import ProfilerActivity, profile

        rank, size = dist.get_rank(), dist.get_world_size()
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
            dist.all_reduce(torch.ones(3))
            dist.all_reduce(torch.ones(2, 2), async_op=True).wait()
            dist.all_gather([torch.zeros(4) for _ in range(size)], torch.ones(4))
            dist.barrier()
            for work in (dist.isend(torch.ones(5), 1 - rank), dist.irecv(torch.zeros(5), 1 - rank)):
                work.wait()
        found: dict[str, Any] = {}
        for event in seen.events():
            if event.name.startswith("horovod:"):
                found.setdefault(event.name, []).append(event.input_shapes)
        return found

    for found in run_in_group(ranks(2, framework="torch"), check):
        assert found["horovod:all_reduce"] == [[[3]], [[2, 2]]]
        assert found["horovod:send"] == found["horovod:recv"] == [[[5]]]
        assert found["horovod:all_gather"] == [[[4]] * 2] and "horovod:barrier" in found
