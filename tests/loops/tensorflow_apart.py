"""Loops of TensorFlow whose ranks come apart after the first step, which they are told within 50 steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from loops.harness import Table

TABLE: Table[Any] = Table("TensorFlow apart")
FIRST = 3
"""The step in which ranks begin to differ."""
LONG = FIRST + 50
APART = r"(?!.*before the first step)(?=.*ranks?\b)(?=.*\bstep\b)(?=.*(kernel|bias))"
"""What ranks are told: the step, the ranks and a variable."""
CHANGED = f"(?=.*gradients of the ranks differ after they were reduced){APART}"
"""What they are told of gradients."""


def _trained(side: Any, change: Callable[[Any, Any, list[Any]], list[Any]], by_tape: bool) -> Any:
    """Reduced gradients are changed by each rank in its own way, from one step on."""
    tf, model = side.tf, side.Network()
    optimizer = side.sgd(momentum=0.9) if by_tape else side.wrap(side.sgd(momentum=0.9))
    optimizer.build(model.variables)

    def step(x: Any, y: Any, changed: bool) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
        if by_tape:
            gradients = side.tape(tape).gradient(loss, model.variables)
        else:
            gradients = side.reduce(optimizer, tape.gradient(loss, model.variables), model.variables)
        if changed:
            gradients = change(side, tf, gradients)
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))

    step = side.step(step)
    for number in range(LONG):
        step(*side.batch(number), number >= FIRST)
    return model


def _divided(side: Any, tf: Any, gradients: list[Any]) -> list[Any]:
    return [each / (3 + side.rank) for each in gradients]


def _clipped_on_one_rank(side: Any, tf: Any, gradients: list[Any]) -> list[Any]:
    return list(tf.clip_by_global_norm(gradients, 0.01)[0]) if side.rank == 0 else gradients


for _name, _change in {
    "reduced_gradients_divided_by_each_ranks_count": _divided,
    "reduced_gradients_clipped_on_one_rank": _clipped_on_one_rank,
}.items():
    for _by_tape in (True, False):
        TABLE.add(
            f"{_name}_{'of_a_tape' if _by_tape else 'of_an_optimizer'}",
            partial(_trained, change=_change, by_tape=_by_tape),
            told=APART if _by_tape else CHANGED,  # a tape does not see with what a plain optimizer steps
        )


def _assigned(side: Any, what: str) -> Any:
    """One rank assigns variables between two steps."""
    model = side.Network()
    optimizer = side.wrap(side.adam())
    optimizer.build(model.variables)

    @side.step
    def step(x: Any, y: Any) -> None:
        with side.tf.GradientTape() as tape:
            loss = model.loss(x, y)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.variables), model.variables, strict=True))

    for number in range(LONG):
        if number == FIRST and side.rank == 0:
            if what == "state":
                for variable in optimizer.variables:
                    if "momentum" in variable.path or "velocity" in variable.path:
                        variable.assign(side.tf.zeros_like(variable.value))
            else:
                for variable, fresh in zip(model.variables, side.Network(seed=5).variables, strict=True):
                    variable.assign(fresh)
        step(*side.batch(number))
    return model


TABLE.add("a_checkpoint_of_variables_loaded_on_one_rank", partial(_assigned, what="variables"), told=APART)
TABLE.add("the_state_of_adam_cleared_on_one_rank", partial(_assigned, what="state"), told=APART)
