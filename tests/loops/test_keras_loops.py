"""Keras 3's loops, each against one process, on every backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from jobs import make_job
from keras_ranks import POOL, env_of
from loops import keras_apart, keras_copies, keras_fit, keras_heads
from loops.harness import Loop, Table, objection
from loops.waiting import WAITING
from part import ALL, backends_of
from ranks import RankPool

TABLES: list[tuple[Table[Any], tuple[str, ...], bool]] = [
    (keras_fit.TABLE, ("tensorflow", "torch", "jax"), False),
    (keras_apart.TABLE, ("tensorflow", "torch", "jax"), False),
    (keras_copies.TABLE, ("tensorflow", "torch", "jax"), False),
    (keras_heads.TABLE, ("tensorflow", "torch"), True),
]
"""Tables, the backends that they are for, and whether models run eagerly."""


def cases() -> list[Any]:
    """All cases, or a part: the loops of the part, each on some backends, and there on one number of ranks."""
    found = []
    for table, backends, eager in TABLES:
        for index, backend in enumerate(backends):
            for number, loop in enumerate(table):
                if backend not in backends_of(loop.name):
                    continue
                for size in loop.sizes if ALL else [loop.sizes[(number + index) % len(loop.sizes)]]:
                    if ALL or loop.part:
                        known = loop.known or WAITING.get(f"{loop.name}-{backend}", "")
                        marks = [pytest.mark.xfail(strict=True, reason=known)] if known else []
                        name = f"{table.name}: {loop.name}-{size}-{backend}"
                        found.append(pytest.param(loop, size, backend, eager, id=name, marks=marks))
    return sorted(found, key=lambda case: str(case.values[2]))


@pytest.mark.parametrize(("loop", "size", "backend", "eager"), cases())
def test_a_loop_trains_as_in_one_process_or_is_refused_by_name(
    ranks: Callable[..., RankPool], loop: Loop[Any], size: int, backend: str, eager: bool
) -> None:
    def run(train: Any, eager: bool) -> Any:
        from loops.keras_side import both_sides

        return both_sides(train, eager)

    job = make_job(lambda size: ranks(POOL, env_of(backend), "keras"), "horovod.keras")
    if backend != "tensorflow":  # Keras multiplies matrices in float32 on PyTorch, and JAX's compiler reorders sums
        loop = dataclasses.replace(loop, tolerance=max(loop.tolerance, 1e-6))
    env = {"HOROVOD_CHECK": "error"} if loop.told and backend != "tensorflow" else {}
    outcomes = job(size, run, loop.train, eager, env=env)
    loop = loop.under(env.get("HOROVOD_CHECK", ""))
    assert not (text := objection(loop, outcomes[0][0], [each for _, each in outcomes])), text
