"""Two models against each other, as scripts write it: the generator's backward pass also goes through the judge.

The gradients that it leaves with the judge are thrown away by the judge's next ``zero_grad()``. They must not be reduced, nor
disturb anything; and no ``synchronize()`` or freezing is asked of the script.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from regression import assert_close, assert_same_on_all_ranks, batches


class Game:
    """A generator and a judge, with an optimizer each."""

    def __init__(self, distributed: bool, **judging: Any) -> None:
        torch.manual_seed(1)
        self.generator, self.judge = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
        self.making: Any = torch.optim.Adam(self.generator.parameters(), lr=0.01, eps=1e-4)
        self.judging: Any = torch.optim.Adam(self.judge.parameters(), lr=0.01, eps=1e-4)
        if distributed:
            self.making = hvd.DistributedOptimizer(self.making, self.generator.named_parameters())
            self.judging = hvd.DistributedOptimizer(self.judging, self.judge.named_parameters(), **judging)

    def judges_loss(self, real: torch.Tensor) -> torch.Tensor:
        fake = self.generator(real.flip(1)).detach()
        return self.judge(fake).sigmoid().mean() - self.judge(real).sigmoid().mean()

    def makers_loss(self, real: torch.Tensor) -> torch.Tensor:
        return -self.judge(self.generator(real.flip(1))).sigmoid().mean()


def judge_first(game: Game, real: torch.Tensor) -> None:
    game.judging.zero_grad()
    game.judges_loss(real).backward()
    game.judging.step()
    game.making.zero_grad()
    game.makers_loss(real).backward()
    game.making.step()


def generator_first(game: Game, real: torch.Tensor) -> None:
    game.making.zero_grad()
    game.makers_loss(real).backward()
    game.making.step()
    game.judging.zero_grad()
    game.judges_loss(real).backward()
    game.judging.step()


def generator_twice(game: Game, real: torch.Tensor) -> None:
    judge_first(game, real)
    game.making.zero_grad()
    game.makers_loss(real).backward()
    game.making.step()


def zeroed_by_the_models(game: Game, real: torch.Tensor) -> None:
    game.judge.zero_grad()
    game.judges_loss(real).backward()
    game.judging.step()
    game.generator.zero_grad()
    game.makers_loss(real).backward()
    game.making.step()


def set_to_zero(game: Game, real: torch.Tensor) -> None:
    game.judging.zero_grad(set_to_none=False)
    game.judges_loss(real).backward()
    game.judging.step()
    game.making.zero_grad(set_to_none=False)
    game.makers_loss(real).backward()
    game.making.step()


def judge_frozen_meanwhile(game: Game, real: torch.Tensor) -> None:
    game.judging.zero_grad()
    game.judges_loss(real).backward()
    game.judging.step()
    game.making.zero_grad()
    game.judge.requires_grad_(False)
    game.makers_loss(real).backward()
    game.judge.requires_grad_(True)
    game.making.step()


def gradients_left_to_add_up(game: Game, real: torch.Tensor) -> None:
    """Nobody throws the judge's gradients away, ever."""
    game.making.zero_grad()
    game.makers_loss(real).backward()
    game.making.step()
    game.judges_loss(real).backward()
    game.judging.step()


ORDERS = [
    judge_first,
    generator_first,
    generator_twice,
    zeroed_by_the_models,
    set_to_zero,
    judge_frozen_meanwhile,
]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("bucket_bytes", ["1", "1000000"])
def test_a_gan_trains_in_any_order_of_its_steps(job: Any, size: int, bucket_bytes: str) -> None:
    def check() -> None:
        for order in ORDERS:
            game, wanted = Game(True), Game(False)
            for (x, _), (all_x, _) in zip(batches(5, size, hvd.rank()), batches(5, size), strict=True):
                order(game, x)
                order(wanted, all_x)
            for found, alone in ((game.generator, wanted.generator), (game.judge, wanted.judge)):
                assert_close(found, alone)
                assert_same_on_all_ranks(found)

    job(size, check, env={"HOROVOD_BUCKET_BYTES": bucket_bytes})


def test_a_gan_whose_discriminator_runs_two_passes_trains_as_in_one_process(job: Any) -> None:
    """One for real and one for fake data, with ``backward_passes_per_step=2`` for them; the generator's pass comes on top."""

    def play(game: Game, real: torch.Tensor) -> None:
        game.judge.zero_grad()
        (-game.judge(real).sigmoid().mean()).backward()
        game.judge(game.generator(real.flip(1)).detach()).sigmoid().mean().backward()
        game.judging.step()
        game.generator.zero_grad()
        game.makers_loss(real).backward()
        game.making.step()

    def check() -> None:
        game, wanted = Game(True, backward_passes_per_step=2), Game(False)
        for (x, _), (all_x, _) in zip(batches(5, 2, hvd.rank()), batches(5, 2), strict=True):
            play(game, x)
            play(wanted, all_x)
        assert_close(game.judge, wanted.judge)
        assert_close(game.generator, wanted.generator)

    job(2, check)


def test_a_gan_with_a_gradient_penalty_trains_as_in_one_process(job: Any) -> None:
    """Gradients of gradients: ``create_graph``, as in Wasserstein training."""

    def play(game: Game, real: torch.Tensor) -> None:
        x = real.clone().requires_grad_()
        game.judging.zero_grad()
        (slope,) = torch.autograd.grad(game.judge(x).sum(), x, create_graph=True)
        (game.judges_loss(real) + (slope.norm(dim=1) - 1).square().mean()).backward()
        game.judging.step()
        game.making.zero_grad()
        game.makers_loss(real).backward(create_graph=True)
        game.making.step()
        game.making.zero_grad()  # a graph that hangs on gradients holds itself
        game.judging.zero_grad()

    def check() -> None:
        game, wanted = Game(True), Game(False)
        for (x, _), (all_x, _) in zip(batches(4, 2, hvd.rank()), batches(4, 2), strict=True):
            play(game, x)
            play(wanted, all_x)
        assert_close(game.judge, wanted.judge)
        assert_close(game.generator, wanted.generator)

    job(2, check)


def test_no_reduction_is_left_open_for_gradients_that_zero_grad_discards(job: Any) -> None:
    def check() -> None:
        game = Game(True)
        for x, _ in batches(3, 2, hvd.rank()):
            judge_first(game, x)
            assert not any(bucket.handle for bucket in game.judging._horovod.parameters.buckets)

    job(2, check, env={"HOROVOD_BUCKET_BYTES": "1"})


def test_gradients_that_the_generator_leaves_add_up_as_in_one_process(job: Any) -> None:
    """With Average, what one left and the other did not is averaged too: the sums are those of one process."""

    def check() -> None:
        game, wanted = Game(True), Game(False)
        for (x, _), (all_x, _) in zip(batches(4, 2, hvd.rank()), batches(4, 2), strict=True):
            gradients_left_to_add_up(game, x)
            gradients_left_to_add_up(wanted, all_x)
        assert_close(game.judge, wanted.judge)

    job(2, check)
