"""Which optimizers of different ranks belong together, whatever else a rank has made, copied, or lived through."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

import horovod.torch as hvd
from regression import MAKERS, assert_close, assert_same_on_all_ranks, batches, loss_of, network


def make(**arguments: Any) -> tuple[nn.Module, Any]:
    model = network()
    return model, hvd.DistributedOptimizer(MAKERS["sgd"](model.parameters()), model.named_parameters(), **arguments)


def step(model: nn.Module, optimizer: Any, rank: int | None, size: int) -> None:
    optimizer.zero_grad()
    loss_of(model, next(batches(1, size, rank))).backward()
    optimizer.step()


def test_an_optimizer_of_another_process_set_does_not_change_which_belong_together(job: Any) -> None:
    def check(sets: Any) -> None:
        if hvd.rank() == 0:
            step(*make(process_set=sets[0]), 0, 1)
        model, optimizer = make()
        step(model, optimizer, hvd.rank(), 2)
        assert_same_on_all_ranks(model)

    job(2, check, sets=[[0]])


def test_a_copy_that_one_rank_makes_does_not_change_which_belong_together(job: Any) -> None:
    def check() -> None:
        model, optimizer = make()
        if hvd.rank() == 0:
            copy.deepcopy((model, optimizer))
        other, second = make()
        step(other, second, hvd.rank(), 2)
        step(model, optimizer, hvd.rank(), 2)
        copied, third = copy.deepcopy((model, optimizer))  # on all ranks, and used
        step(copied, third, hvd.rank(), 2)
        step(model, optimizer, hvd.rank(), 2)
        for each in (model, other, copied):
            assert_same_on_all_ranks(each)
        assert_close(copied, model)

    job(2, check)


def test_an_optimizer_of_earlier_jobs_trains_with_one_that_was_just_made(job: Any) -> None:
    """As after elastic training has replaced a rank: rank 0's has been used in jobs of one, rank 1's is new."""

    def check() -> None:
        rank = hvd.rank()
        hvd.shutdown()
        wanted = network()
        other = MAKERS["sgd"](wanted.parameters())
        if rank == 0:
            made = []
            for _ in range(2):
                hvd.init(comm=[0])
                made = made or [make(), make()]
                for model, optimizer in made:
                    step(model, optimizer, 0, 1)
                hvd.shutdown()
            for model, _ in made:
                model.load_state_dict(wanted.state_dict())
        hvd.init()
        if rank == 1:
            made = [make(), make()]
        for _ in range(2):
            for _, optimizer in reversed(made) if rank == 0 else made:
                optimizer.zero_grad()
            for model, optimizer in made:
                step(model, optimizer, rank, 2)
            step(wanted, other, None, 2)
        for model, _ in made:
            assert_close(model, wanted)
            assert_same_on_all_ranks(model)

    job(2, check)


def test_an_optimizer_made_anew_each_cycle_trains_with_the_first_one_of_a_process(job: Any) -> None:
    """The one of the cycle before is still there when the next is made."""

    def check() -> None:
        rank = hvd.rank()
        hvd.shutdown()
        if rank == 0:
            for _ in range(3):
                hvd.init(comm=[0])
                model, optimizer = make()
                step(model, optimizer, 0, 1)
                hvd.shutdown()
        hvd.init()
        model, optimizer = make()
        step(model, optimizer, rank, 2)
        assert_same_on_all_ranks(model)

    job(2, check)
