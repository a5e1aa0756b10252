"""The default group changes its members when the script says so, as with PyTorch's _reconfigure; Gloo's own does the same."""

from __future__ import annotations

import functools
import logging
import os
import random
import signal
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from horovod._base import config
from ranks import RankPool
from torch_versions import needs_torch

Ranks = Callable[..., RankPool]

pytestmark = needs_torch("2.6", "C++ code that asks a group in Python for its size")
needs_reconfigure = needs_torch("2.14", "torch.distributed._reconfigure")
needs_backends = needs_torch("2.15", "back ends in Python")
both = pytest.mark.parametrize("backend", ["horovod", pytest.param("gloo", marks=needs_reconfigure)])


def on_members(
    pool: RankPool,
    function: Callable[..., Any],
    *args: Any,
    backend: str = "horovod",
    dies: Collection[int] = (),
) -> list[Any]:
    """``function(member, *args)`` in every process of the pool, where none has members yet; what each returned."""

    @functools.wraps(function)  # so that it travels together with the module of the test
    def call(folder: str, *args: Any) -> Any:
        import torch.distributed as dist

        from reconfiguring import Member

        store = dist.FileStore(f"{folder}/store", -1)
        member = Member(int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"]), store, backend)
        try:
            return function(member, *args)
        finally:
            member.end()

    with tempfile.TemporaryDirectory(prefix="horovod-store-") as folder:
        return pool.run(call, folder, *args, dies=dies)


@both
def test_a_group_has_no_members_until_they_are_said(ranks: Ranks, backend: str) -> None:
    def check(member: Any) -> None:
        import torch
        import torch.distributed as dist

        assert member.supported()
        assert (dist.get_rank(), dist.get_world_size()) == (member.rank, member.size)
        with pytest.raises(RuntimeError, match="_reconfigure" if dist.get_backend() == "horovod" else ""):
            dist.all_reduce(torch.ones(2))
        member.reconfigure(1, member.handles("first"))
        assert member.members() == list(range(member.size)) and member.supported()
        member.join_all(2, "same")

    pool = ranks(3, framework="torch")
    on_members(pool, check, backend=backend)
    with pool.leaves_nothing():
        on_members(pool, check, backend=backend)


@both
def test_the_order_of_the_handles_gives_the_ranks(ranks: Ranks, backend: str) -> None:
    def check(member: Any) -> None:
        for uuid, order in enumerate([[0, 1, 2], [2, 0, 1], [1, 0, 2]]):
            listed = member.handles(f"handles {uuid}")
            member.reconfigure(uuid, [listed[each] for each in order])
            assert member.members() == order

    on_members(ranks(3, framework="torch"), check, backend=backend)


@both
@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_a_group_shrinks_by_any_rank(ranks: Ranks, backend: str, left_out: int) -> None:
    def check(member: Any, left_out: int) -> None:
        member.reconfigure(5, member.handles("all"))
        listed = member.handles("again")
        if member.rank != left_out:
            member.reconfigure(6, [each for rank, each in enumerate(listed) if rank != left_out])
            assert member.members() == [rank for rank in range(3) if rank != left_out]
        member.meet("done")

    on_members(ranks(3, framework="torch"), check, left_out, backend=backend)


@both
def test_one_rank_alone_and_all_again(ranks: Ranks, backend: str) -> None:
    def check(member: Any) -> None:
        for turn in range(3):
            member.reconfigure(10 * turn + member.rank, [member.handle()])
            assert member.members() == [member.rank]
            member.join_all(10 * turn + 5, f"turn {turn}")

    on_members(ranks(3, framework="torch"), check, backend=backend)


@both
def test_two_groups_become_one(ranks: Ranks, backend: str) -> None:
    def check(member: Any) -> None:
        listed = member.handles("first")
        mine = [0] if member.rank == 0 else [1, 2]
        member.reconfigure(mine[0], [listed[each] for each in mine])
        assert member.members() == mine
        member.join_all(7, "second")

    on_members(ranks(3, framework="torch"), check, backend=backend)


@both
def test_a_rank_joins_late(ranks: Ranks, backend: str) -> None:
    def check(member: Any) -> None:
        if member.rank != 2:
            member.reconfigure(0, member.handles("first", [0, 1]))
            assert member.members() == [0, 1]
        member.join_all(1, "second")

    on_members(ranks(3, framework="torch"), check, backend=backend)


def test_groups_of_other_members_at_the_same_time_share_nothing(ranks: Ranks) -> None:
    """Nor do the groups of some of their ranks, which have the same names, and their messages."""

    def check(member: Any) -> None:
        import torch
        import torch.distributed as dist

        for turn in range(2):
            listed = member.handles(f"turn {turn}")
            mine = [0, 1] if member.rank < 2 else [3, 2]
            member.reconfigure(2 * turn + mine[0] // 3, [listed[each] for each in mine])
            assert member.members() == mine
            other = dist.new_group([1, 0])
            local = dist.new_group([0, 1], use_local_synchronization=True)
            for group in (other, local):
                total = torch.zeros(4)
                total[member.rank] = 1
                dist.all_reduce(total, group=group)
                assert total.nonzero().flatten().tolist() == sorted(mine)
            received: list[Any] = [None] * 2
            dist.all_gather_object(received, member.rank, group=other)
            assert sorted(received) == sorted(mine)
            member.meet(f"end {turn}")
        member.join_all(9, "all")
        with pytest.raises((RuntimeError, ValueError)):  # it ended with its ranks
            dist.all_reduce(torch.ones(1), group=other)

    on_members(ranks(4, framework="torch"), check)


@both
def test_an_abort_is_recovered_from(ranks: Ranks, backend: str) -> None:
    def check(member: Any) -> None:
        import torch
        import torch.distributed as dist

        member.join_all(0, "first")
        if dist.get_backend() == "horovod":
            member.meet("all have met")
            if member.rank == 1:
                member.backend.abort()
            with pytest.raises(RuntimeError, match="abort"):
                for _ in range(1000):
                    dist.all_reduce(torch.ones(2))
        else:
            member.backend.abort()
        member.join_all(1, "second")

    on_members(ranks(3, framework="torch"), check, backend=backend)


@both
def test_a_uuid_is_used_once(ranks: Ranks, backend: str) -> None:
    def check(member: Any) -> None:
        import torch.distributed as dist

        mine = 20 + member.rank
        member.reconfigure(mine, [member.handle()])
        with pytest.raises(RuntimeError, match="already used"):
            member.reconfigure(mine, [member.handle()])
        assert member.members() == [member.rank]  # nothing has changed
        member.meet("all have used theirs")
        with pytest.raises(RuntimeError, match="already used"):
            member.reconfigure(20 + (member.rank + 1) % 3, [member.handle()])
        assert member.members() == [member.rank]
        listed = member.handles("all")
        if dist.get_backend() == "horovod":  # with Gloo the others wait for the rank that refuses
            with pytest.raises(RuntimeError, match="already used"):
                member.reconfigure(22, listed)
        member.reconfigure(30, listed)
        assert member.members() == [0, 1, 2]

    on_members(ranks(3, framework="torch"), check, backend=backend)


def test_wrong_arguments_change_nothing(ranks: Ranks) -> None:
    def check(member: Any) -> None:
        member.reconfigure(0, member.handles("first"))
        listed = member.handles("again")
        own, other = member.handle(), listed[member.rank - 1]
        for uuid, handles, said in [
            (1, [own, other, own], "more than once"),
            (2, [own, "gloo:1:2:3"], "not a handle"),
            (3, [own, "horovod"], "not a handle"),
            (4, [other], "not one of the 1"),
            (5, [], "not one of the 0"),
        ]:
            with pytest.raises(RuntimeError, match=said):
                member.reconfigure(uuid, handles)
        assert member.handle() == own and member.members() == [0, 1, 2]
        member.reconfigure(1, listed)  # a uuid that was refused for another reason is still new
        assert member.members() == [0, 1, 2]

    on_members(ranks(3, framework="torch"), check)


def test_a_member_that_does_not_come_is_named_and_may_come_later(ranks: Ranks) -> None:
    def check(member: Any) -> None:
        import torch
        import torch.distributed as dist

        listed = member.handles("first")
        process = [each.split(":")[2] for each in listed]
        for missing in range(3):
            if member.rank != missing:
                with pytest.raises(RuntimeError, match=f"rank {missing} .process {process[missing]} on "):
                    member.reconfigure(missing, listed, seconds=0.3)
                with pytest.raises(RuntimeError, match="has no members now"):
                    dist.all_reduce(torch.ones(2))
            member.meet(f"without {missing}")
        member.reconfigure(10, listed)
        assert member.members() == [0, 1, 2]

    on_members(ranks(3, framework="torch"), check)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_the_others_go_on_without_a_lost_rank_with_the_same_model(ranks: Ranks, lost: int) -> None:
    """A DistributedDataParallel is the same object, divides by the ranks that are left, and trains as one process would."""

    def check(member: Any, lost: int) -> list[list[float]]:
        import torch
        import torch.distributed as dist

        def step(model: Any, ranks: list[int]) -> None:
            model.zero_grad()
            for rank in ranks:
                inputs = torch.linspace(-1, 1 + rank, 12, dtype=torch.float64).view(4, 3)
                loss = (model(inputs) ** 2).mean()
                (loss / (1 if model is ddp else len(ranks))).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad

        listed = member.handles("first")
        member.reconfigure(0, listed)
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
        ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.0001)
        torch.manual_seed(3)
        alone = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
        for _ in range(3):
            step(ddp, [member.rank])
            step(alone, [0, 1, 2])
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        member.meet("trained")  # else others may be in the last step when this rank ends
        if member.rank == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError):
            for _ in range(1000):
                step(ddp, [member.rank])
        model.load_state_dict(saved)
        left = [rank for rank in range(3) if rank != lost]
        told: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]  # of this one handler
        logging.getLogger("horovod.torch").addHandler(handler)
        member.reconfigure(1, [listed[rank] for rank in left])
        assert member.members() == left
        for _ in range(4):
            step(ddp, [member.rank])
            step(alone, left)
        for mine, reference in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-12)
        assert dist.get_world_size() == 2
        logging.getLogger("horovod.torch").removeHandler(handler)
        names = listed[lost].split(":")
        named = f"2 ranks of the process group go on without rank {lost} (process {names[2]} on {names[1]}): "
        assert [each.startswith(named) for each in told] == [True] * (dist.get_rank() == 0)
        return [each.flatten().tolist() for each in model.parameters()]

    found = on_members(ranks(3, framework="torch"), check, lost, dies={lost})
    left = [each for rank, each in enumerate(found) if rank != lost]
    assert left[0] == left[1]  # to the bit


def test_hvd_follows_and_outlives_the_group_if_the_script_has_begun_it(ranks: Ranks) -> None:
    def check(member: Any) -> None:
        import torch

        import horovod.torch as hvd

        listed = member.handles("first")
        member.reconfigure(0, listed)
        hvd.init()
        assert (hvd.rank(), hvd.size()) == (member.rank, 3)
        if member.rank < 2:
            member.reconfigure(1, listed[1::-1])
            assert (hvd.rank(), hvd.size()) == (1 - member.rank, 2)
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
            member.end()
            assert hvd.is_initialized() and hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
        hvd.shutdown()

    on_members(ranks(3, framework="torch"), check)


def test_members_of_other_groups_are_fixed(ranks: Ranks) -> None:
    def check(member: Any) -> None:
        import torch.distributed as dist

        member.reconfigure(0, member.handles("first"))
        some = dist.new_group([0, 1])
        if member.rank < 2:
            assert not some.supports_reconfigure
            with pytest.raises(RuntimeError, match="fixed"):
                some.get_reconfigure_handle()
            with pytest.raises(RuntimeError, match="fixed"):
                some.reconfigure(None)
        assert member.supported()
        member.meet("end")

    on_members(ranks(3, framework="torch"), check)


def test_jobs_of_fixed_ranks_and_of_elastic_launchers_refuse_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch.distributed as dist

    from reconfiguring import Member

    monkeypatch.setattr("horovod.core.lifecycle.elastic_process.this_process", lambda: object())
    with pytest.raises(ValueError, match="in an elastic job the launcher chooses"):
        Member(0, 1, dist.FileStore(str(tmp_path / "store"), 1))
    monkeypatch.undo()
    monkeypatch.setenv(config.CPU_OPERATIONS, "MPI")
    with pytest.raises(ValueError, match="MPI's ranks are fixed"):
        Member(0, 1, dist.FileStore(str(tmp_path / "store"), 1))


@needs_backends
def test_calls_of_cpp_code_reach_the_group(ranks: Ranks) -> None:
    """C++ code calls the methods of ProcessGroup, which pass to the Backend what Python code has not replaced."""

    def check(member: Any) -> None:
        from datetime import timedelta

        import torch.distributed as dist
        from torch._C._distributed_c10d import ErrorType, ReconfigureOptions

        kind, group = dist.ProcessGroup, member.group
        assert kind.supports_reconfigure.__get__(group)
        assert member.backend.supports_reconfigure
        assert kind.get_reconfigure_handle(group) == member.backend.get_reconfigure_handle() == member.handle()
        listed = member.handles("first")
        for uuid, call in enumerate((lambda each: kind.reconfigure(group, each), member.backend.reconfigure)):
            options = ReconfigureOptions()
            options.uuid, options.handles, options.timeout = uuid, listed[::-1], timedelta(seconds=60)
            assert call(options).wait()
            assert member.members() == [2, 1, 0]
            for asked in (group, member.backend):
                assert (asked.rank(), asked.size()) == (2 - member.rank, 3)
            assert (kind.rank(group), kind.size(group)) == (2 - member.rank, 3)
        options.uuid, options.handles = 10, set(listed)
        group.reconfigure(options).wait()
        assert member.members() == sorted(range(3), key=lambda rank: listed[rank])
        assert member.backend.get_error() == ErrorType.SUCCESS

    on_members(ranks(3, framework="torch"), check)


@both
@pytest.mark.parametrize("seed", range(5))
def test_a_random_history_is_as_its_model_says(ranks: Ranks, backend: str, seed: int) -> None:
    """Any processes form groups in any order, at the same time, while others wait in groups that they were members of."""

    def check(member: Any, history: list[list[list[int]]]) -> None:
        import torch
        import torch.distributed as dist

        mine: list[int] = []  # the members of the group of this process, if they are all in it still
        for turn, groups in enumerate(history):
            listed = member.handles(f"turn {turn}")
            uuids = {rank: 10 * turn + number for number, group in enumerate(groups) for rank in group}
            found = next((group for group in groups if member.rank in group), None)
            if found is not None:
                mine = found
                member.reconfigure(uuids[member.rank], [listed[rank] for rank in found])
                assert member.members() == mine
            elif any(rank in uuids for rank in mine):
                mine = []
                if dist.get_backend() == "horovod":  # with Gloo it would wait
                    with pytest.raises(RuntimeError):
                        dist.all_reduce(torch.ones(1))
            member.meet(f"end of turn {turn}")
            if mine:
                assert member.members() == mine

    chance = random.Random(seed)
    history = []
    for _ in range(6):
        order = chance.sample(range(4), chance.randint(1, 4))
        cuts = sorted(chance.sample(range(1, len(order)), chance.randint(0, len(order) - 1)))
        history.append([order[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(order)], strict=True)])
    on_members(ranks(4, framework="torch"), check, history, backend=backend)
