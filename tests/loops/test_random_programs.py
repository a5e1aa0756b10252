"""Random training programs of TensorFlow, eagerly on real ranks, against one process.

A program is a list of steps. In each, every rank takes a head of its own or none, some variables are frozen, gradients of one
or two batches are added up, and are clipped or not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs import make_job
from keras_ranks import tensorflow_pool
from loops.harness import Loop, objection
from part import draws
from ranks import RankPool

RANKS, HEADS = 2, 3


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        heads: of each rank in each pass; None: the rank has no loss.
        clip: the global norm is clipped, after a reduction by a distributed tape or by the tool.
        by_tape: gradients are reduced by a distributed tape, not by the optimizer.
        frozen: the trunk gets no gradients.
    """

    heads: tuple[tuple[int | None, ...], ...]
    clip: bool
    by_tape: bool
    frozen: bool


heads = st.tuples(*[st.none() | st.integers(0, HEADS - 1)] * RANKS).filter(lambda each: set(each) != {None})
steps = st.builds(
    Step,
    heads=st.lists(heads, min_size=1, max_size=2).map(tuple),
    clip=st.booleans(),
    by_tape=st.booleans(),
    frozen=st.booleans(),
)


def trained(program: list[Step], kind: str) -> Callable[[Any], Any]:
    """The loop of a program."""

    def loop(side: Any) -> Any:
        tf, model = side.tf, side.Network(heads=HEADS)
        optimizer = side.wrap({"sgd": side.sgd(momentum=0.9), "adam": side.adam(weight_decay=0.01)}[kind])
        optimizer.build(model.variables)
        ranks = [side.rank] if side.distributed else range(side.size)
        for number, step in enumerate(program):
            variables = model.variables[2:] if step.frozen else model.variables
            total: list[Any] = [None] * len(variables)
            for part, chosen in enumerate(step.heads):
                x, y = side.batch(10 * number + part)
                parts = list(zip(tf.split(x, len(ranks)), tf.split(y, len(ranks)), ranks, strict=True))
                with tf.GradientTape() as tape:
                    losses = [
                        model.loss(rows, of, chosen[rank]) for rows, of, rank in parts if chosen[rank] is not None
                    ]
                    loss = tf.add_n([*losses, tf.zeros([], tf.float64)]) / len(ranks)
                tape = side.tape(tape) if step.by_tape else tape
                for index, gradient in enumerate(tape.gradient(loss, variables)):
                    if gradient is not None:
                        total[index] = gradient if total[index] is None else total[index] + gradient
            if not step.by_tape:
                total = side.reduce(optimizer, total, variables)
            if step.clip:
                total, _ = tf.clip_by_global_norm(total, 0.05)
            optimizer.apply_gradients(zip(total, variables, strict=True))
        return model

    return loop


@settings(max_examples=draws(12), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(program=st.lists(steps, min_size=1, max_size=3), kind=st.sampled_from(["sgd", "adam"]))
def test_a_random_program_trains_as_in_one_process(
    ranks: Callable[..., RankPool], program: list[Step], kind: str
) -> None:
    def run(train: Any) -> Any:
        from loops.tensorflow_side import both_sides

        return both_sides(train, False)

    job = make_job(lambda size: tensorflow_pool(ranks, 3), "horovod.tensorflow.keras")
    outcomes = job(RANKS, run, trained(program, kind))
    loop: Loop[Any] = Loop("random program", trained(program, kind))
    assert not (text := objection(loop, outcomes[0][0], [each for _, each in outcomes])), text
