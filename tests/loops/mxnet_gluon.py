"""Loops of MXNet's Gluon: right ones, and those whose ranks come apart, which they are told within 50 steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from loops.harness import Table

TABLE: Table[Any] = Table("Gluon")
FIRST = 3
"""The step in which ranks begin to differ."""
LONG = FIRST + 50
STEPS = 6
TIGHT = 0.5
APART = r"(?!.*before the first step)(?=.*ranks?\b)(?=.*\bstep\b)(?=.*(weight|bias))"
"""What ranks are told: the step, the ranks and a parameter."""
CHANGED = f"(?=.*gradients of the ranks differ after they were reduced){APART}"
"""What they are told of gradients."""
ROUNDED = 2e-5
"""MXNet computes in single precision."""


def _trained(
    side: Any,
    change: Callable[[Any, Any, int], None] = lambda side, net, step: None,
    between: Callable[[Any, Any, Any, int], None] = lambda side, net, trainer, step: None,
    steps: int = STEPS,
    **optimizer: Any,
) -> Any:
    """Training that changes reduced gradients, and something between two steps."""
    net = side.network()
    trainer = side.trainer(net, **(optimizer or {"learning_rate": 0.3, "momentum": 0.9}))
    for step in range(steps):
        between(side, net, trainer, step)
        side.backward(net, step)
        side.reduce(trainer)
        change(side, net, step)
        trainer.update(side.rows)
    return net


def _clip(side: Any, net: Any, step: int) -> None:
    side.mx.gluon.utils.clip_global_norm(side.gradients(net), TIGHT)


def _noise(side: Any, net: Any, step: int) -> None:
    """Of one seed for all ranks."""
    for number, gradient in enumerate(side.gradients(net)):
        gradient += 0.01 * (number + step % 3)


def _another_rate(side: Any, net: Any, trainer: Any, step: int) -> None:
    if step == FIRST:
        trainer.set_learning_rate(0.05)


TABLE.add("momentum", _trained, tolerance=ROUNDED)
TABLE.add("adam", partial(_trained, optimizer="adam", learning_rate=0.05), tolerance=ROUNDED)
TABLE.add("clipped_after_the_reduction", partial(_trained, change=_clip, steps=LONG), tolerance=10 * ROUNDED)
TABLE.add("noise_that_is_the_same_on_all_ranks", partial(_trained, change=_noise, steps=LONG), tolerance=10 * ROUNDED)
TABLE.add("another_rate_on_all_ranks", partial(_trained, between=_another_rate, steps=LONG), tolerance=10 * ROUNDED)


@TABLE.loop(tolerance=ROUNDED)
def first_weights_of_one_rank(side: Any) -> Any:
    net = side.network(seed=1 + side.rank)
    if side.distributed:
        side.hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    trainer = side.trainer(net, learning_rate=0.3)
    for step in range(LONG):
        side.backward(net, step)
        trainer.step(side.rows)
    return net


@TABLE.loop(tolerance=ROUNDED)
def an_optimizer_that_the_script_calls(side: Any) -> Any:
    net = side.network()
    optimizer = side.mx.optimizer.SGD(learning_rate=0.3, momentum=0.9, rescale_grad=1.0 / side.rows)
    if side.distributed:
        optimizer = side.hvd.DistributedOptimizer(optimizer)
    updater = side.mx.optimizer.get_updater(optimizer)
    for step in range(STEPS):
        side.backward(net, step)
        for number, (_, parameter) in enumerate(sorted(net.collect_params().items())):
            updater(number, parameter.list_grad()[0], parameter.data())
    return net


def _divide(side: Any, net: Any, step: int) -> None:
    for gradient in side.gradients(net):
        gradient /= 3 + side.rank


def _divide_later(side: Any, net: Any, step: int) -> None:
    if step >= FIRST:
        _divide(side, net, step)


def _clip_on_one_rank(side: Any, net: Any, step: int) -> None:
    if side.rank == 0:
        _clip(side, net, step)


def _load(side: Any, net: Any, trainer: Any, step: int) -> None:
    if step == FIRST and side.rank == 0:
        side.set_weights(net, 5)


def _clear(side: Any, net: Any, trainer: Any, step: int) -> None:
    if step == FIRST and side.rank == 0:
        for each in trainer._updaters:
            each.states.clear()


def _rate_of_each(side: Any, net: Any, trainer: Any, step: int) -> None:
    if step == FIRST:
        trainer.set_learning_rate(0.1 / (1 + side.rank))


CHANGES = {
    "reduced_gradients_divided_by_each_ranks_count": _divide,
    "reduced_gradients_divided_later": _divide_later,
    "reduced_gradients_clipped_on_one_rank": _clip_on_one_rank,
}
for _name, _change in CHANGES.items():
    TABLE.add(_name, partial(_trained, change=_change, steps=LONG), told=CHANGED)
TABLE.add("weights_set_on_one_rank", partial(_trained, between=_load, steps=LONG), told=APART)
TABLE.add(
    "the_state_of_adam_cleared_on_one_rank",
    partial(_trained, between=_clear, steps=LONG, optimizer="adam", learning_rate=0.05),
    told=APART,
)
TABLE.add(
    "a_rate_of_each_rank",
    partial(_trained, between=_rate_of_each, steps=LONG),
    told="(?=.*different hyper-parameters)(?=.*lr)",
)
