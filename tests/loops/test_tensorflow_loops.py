"""TensorFlow's loops, each against one process, eagerly and in graphs; those of Keras 2 as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jobs import make_job
from keras_ranks import tensorflow_pool
from loops import tensorflow_apart, tensorflow_heads, tensorflow_legacy, tensorflow_tape
from loops.harness import Loop, Table, objection
from part import ALL
from ranks import RankPool

EAGERLY, COMPILED = "eager", "graph"
TABLES: list[tuple[Table[Any], tuple[str, ...], int]] = [
    (tensorflow_tape.TABLE, (EAGERLY, COMPILED), 3),
    (tensorflow_apart.TABLE, (EAGERLY, COMPILED), 3),
    (tensorflow_heads.EAGER, (EAGERLY,), 3),
    (tensorflow_heads.GRAPH, (COMPILED,), 3),
    (tensorflow_legacy.KERAS_2, (EAGERLY, COMPILED), 2),
    (tensorflow_legacy.TENSORFLOW_1, (EAGERLY,), 3),
]
"""Tables, how their steps run, and the version of Keras."""


def cases() -> list[Any]:
    """All cases, or a part: every loop in one of its modes, and on one number of ranks."""
    found = []
    for table, modes, version in TABLES:
        for number, loop in enumerate(table):
            own = loop.arguments.get("modes", modes)
            for mode in own if ALL else [own[number % len(own)]]:
                for size in loop.sizes if ALL else [loop.sizes[number // 2 % len(loop.sizes)]]:
                    if ALL or loop.part:
                        marks = [pytest.mark.xfail(strict=True, reason=loop.known)] if loop.known else []
                        name = f"{table.name}: {loop.name}-{size}-{mode}"
                        found.append(pytest.param(loop, size, mode, version, id=name, marks=marks))
    return sorted(found, key=lambda case: int(case.values[3]))


@pytest.mark.parametrize(("loop", "size", "mode", "version"), cases())
def test_a_loop_trains_as_in_one_process_or_is_refused_by_name(
    ranks: Callable[..., RankPool], loop: Loop[Any], size: int, mode: str, version: int
) -> None:
    from loops.tensorflow_side import both_sides

    job = make_job(lambda size: tensorflow_pool(ranks, version), "horovod.tensorflow.keras")
    env = {"HOROVOD_CHECK": "error"} if loop.told and mode == COMPILED else {}
    outcomes = job(size, both_sides, loop.train, mode == COMPILED, env=env)
    loop = loop.under(env.get("HOROVOD_CHECK", ""))
    assert not (text := objection(loop, outcomes[0][0], [each for _, each in outcomes])), text
