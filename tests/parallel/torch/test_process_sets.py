"""Collectives of subsets of the ranks that ``init(process_sets=...)`` was given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import horovod.torch as hvd


def test_all_operations_of_a_set_are_among_its_members(job: Any) -> None:
    def check(sets: Any) -> None:
        odd, ends = sets  # ranks 1 and 2, ranks 0 and 3
        mine = odd if hvd.rank() in (1, 2) else ends
        low, high = mine.ranks
        assert mine.included() and mine.size() == 2 and mine.rank() == (0 if hvd.rank() == low else 1)
        own = torch.tensor([float(hvd.rank()), 10.0])
        assert hvd.allreduce(own, op=hvd.Sum, process_set=mine).tolist() == [3.0, 20.0]
        assert hvd.allreduce(own, process_set=mine).tolist() == [1.5, 10.0]
        assert hvd.allreduce(own, op=hvd.Sum).tolist() == [6.0, 40.0]  # all four in between
        assert hvd.grouped_allreduce([own], op=hvd.Max, process_set=mine)[0].tolist() == [high, 10.0]
        assert hvd.allgather(own[:1], process_set=mine).tolist() == [low, high]
        assert hvd.broadcast(own[:1], high, process_set=mine).tolist() == [high]  # the root is a global rank
        assert hvd.alltoall(own, process_set=mine).tolist() == ([low, high] if hvd.rank() == low else [10.0, 10.0])
        assert hvd.reducescatter(own, op=hvd.Sum, process_set=mine).tolist() == ([3.0] if hvd.rank() == low else [20.0])
        assert hvd.broadcast_object({"from": hvd.rank()}, high, process_set=mine) == {"from": high}
        assert hvd.allgather_object(hvd.rank(), process_set=mine) == [low, high]
        hvd.barrier(mine)
        hvd.barrier(process_set=hvd.global_process_set)

    job(4, check, sets=[[1, 2], [0, 3]])


def test_one_name_can_be_in_flight_in_two_sets_at_once(job: Any) -> None:
    def check(sets: Any) -> None:
        (pair,) = sets
        handles = [hvd.allreduce_async(torch.ones(1), name="x", op=hvd.Sum)]
        if pair.included():
            handles.append(hvd.allreduce_async(torch.ones(1), name="x", op=hvd.Sum, process_set=pair))
        assert [hvd.synchronize(handle).item() for handle in handles] == [3.0, 2.0][: len(handles)]

    job(3, check, sets=[[0, 1]])


def test_ranks_that_share_several_sets_may_submit_to_them_in_any_order(job: Any) -> None:
    """Ranks that share several sets may wait for them in any order."""

    def check(sets: Any) -> None:
        order = [hvd.global_process_set, *sets] if hvd.rank() % 2 else [*reversed(sets), hvd.global_process_set]
        for turn in range(20):
            handles = {
                which.process_set_id: hvd.allreduce_async(
                    torch.full((1 + turn * 1000,), 1.0), name=f"t{turn}", op=hvd.Sum, process_set=which
                )
                for which in order
                if which.process_set_id == 0 or which.included()
            }
            for number, handle in handles.items():
                assert hvd.synchronize(handle)[-1].item() == [3.0, 2.0, 2.0, 1.0][number]

    job(3, check, sets=[[0, 1], [1, 2], [2]])


def test_ranks_outside_of_a_set_are_refused(job: Any) -> None:
    def check(sets: Any) -> None:
        (pair,) = sets
        if hvd.rank() == 2:
            assert not pair.included()
            with pytest.raises(ValueError, match="not part of provided process set"):
                pair.rank()
            assert pair.size() == 2
            one = torch.ones(2)
            calls = {
                "Allreduce": lambda: hvd.allreduce(one, process_set=pair),
                "Allgather": lambda: hvd.allgather(one, process_set=pair),
                "Broadcast": lambda: hvd.broadcast(one, 0, process_set=pair),
                "Alltoall": lambda: hvd.alltoall(one, process_set=pair),
                "Reducescatter": lambda: hvd.reducescatter(one, process_set=pair),
                "Barrier": lambda: hvd.barrier(pair),
            }
            for operation, call in calls.items():
                with pytest.raises(ValueError, match=f"{operation}: Rank 2 is not a member"):
                    call()
        else:
            with pytest.raises(ValueError, match="invalid root rank 2 for provided process set"):
                hvd.broadcast(torch.ones(1), 2, process_set=pair)
        with pytest.raises(ValueError, match="does not exist, or has not been registered"):
            hvd.allreduce(torch.ones(1), process_set=hvd.ProcessSet([0, 2]))
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="afterwards").item() == 3.0

    job(3, check, sets=[[0, 1]])


def test_in_a_set_of_one_every_operation_returns_what_it_gets(job: Any) -> None:
    def check(sets: Any) -> None:
        own = sets[hvd.rank()]
        one = torch.arange(3.0)
        assert torch.equal(hvd.allreduce(one, process_set=own), one)
        assert torch.equal(hvd.allgather(one, process_set=own), one)
        assert torch.equal(hvd.reducescatter(one, process_set=own), one)
        assert torch.equal(hvd.alltoall(one, [2], process_set=own)[0], one[:2])
        assert torch.equal(hvd.broadcast(one, hvd.rank(), process_set=own), one)

    job(2, check, sets=[[0], [1]])


def test_unnamed_operations_of_a_set_do_not_shift_the_numbers_of_all_ranks(job: Any) -> None:
    def check(sets: Any) -> None:
        (pair,) = sets
        if pair.included():
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).item() == 2.0
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3.0

    job(3, check, sets=[[0, 1]])


def test_a_refused_operation_uses_up_no_name(job: Any) -> None:
    def check(sets: Any) -> None:
        (pair,) = sets
        if hvd.rank() == 2:
            with pytest.raises(ValueError, match="not a member"):
                hvd.allreduce(torch.ones(1), process_set=pair)
            with pytest.raises(ValueError, match="root rank"):
                hvd.broadcast(torch.ones(1), 5)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3.0
        assert hvd.broadcast(torch.ones(1), 0).item() == 1.0

    job(3, check, sets=[[0, 1]])


def test_ids_are_given_and_looked_up_again(job: Any) -> None:
    def check(sets: Any) -> None:
        assert [each.process_set_id for each in sets] == [1, 2]
        again = hvd.ProcessSet([2, 0])
        hvd.init(process_sets=[again])  # runs already: looks them up
        assert again.process_set_id == 2
        assert hvd.global_process_set.process_set_id == 0 and hvd.global_process_set.ranks == [0, 1, 2]
        assert hvd.global_process_set.size() == 3 and hvd.global_process_set.rank() == hvd.rank()

    job(3, check, sets=[[0, 1], [0, 2]])


def test_sets_that_contradict_each_other_or_themselves_are_refused_by_init(job: Any) -> None:
    def check() -> None:
        hvd.shutdown()
        with pytest.raises(ValueError, match="different process sets"):
            hvd.init(process_sets=[hvd.ProcessSet([hvd_rank()])])
        with pytest.raises(ValueError, match="rank 7 is not one of the job's 2"):
            hvd.init(process_sets=[hvd.ProcessSet([0, 7])])
        with pytest.raises(ValueError, match="duplicate"):
            hvd.init(process_sets=[hvd.ProcessSet([1]), hvd.ProcessSet([1])])
        hvd.shutdown()
        hvd.init()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0

    def hvd_rank() -> int:
        import os

        return int(os.environ["HOROVOD_RANK"])

    job(2, check)


def test_an_optimizer_of_a_set_averages_over_its_members_alone(job: Any) -> None:
    def check(sets: Any) -> list[float]:
        (pair,) = sets
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), process_set=pair)
        found = []
        for _ in range(2):
            optimizer.zero_grad()
            (parameter * (hvd.rank() + 1)).sum().backward()
            optimizer.step()
            found.append(parameter.item())
            with optimizer.skip_synchronize():
                pass
        optimizer.zero_grad()
        (parameter * (hvd.rank() + 1)).sum().backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        return [*found, parameter.item()]

    assert job(3, check, sets=[[0, 2]]) == [[-2.0, -4.0, -6.0]] * 3
    assert job(3, check, sets=[[0, 1]]) == [[-1.5, -3.0, -4.5], [-1.5, -3.0, -4.5], [-3.0, -6.0, -9.0]]
