"""The NovoGrad of the Fashion-MNIST example against the equations of its paper, on every backend, alone and distributed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs import make_job
from keras_ranks import POOL, env_of
from part import some

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fashion_mnist"
STEPS = 6


def gradients() -> list[list[Any]]:
    random = np.random.default_rng(1)
    return [[random.normal(size=(3, 2)) * 10**step, random.normal(size=2)] for step in range(-3, STEPS - 3)]


def as_in_the_paper(
    rate: float, beta_1: float, beta_2: float, epsilon: float, decay: float, averaging: bool
) -> list[Any]:
    """Algorithm 1, layer by layer, in float64."""
    weights = [np.linspace(-1, 1, 6).reshape(3, 2), np.array([0.5, -0.5])]
    m: list[Any] = [0.0, 0.0]
    v: list[Any] = [None, None]
    for step in gradients():
        for layer, g in enumerate(step):
            square = float(np.linalg.norm(g)) ** 2
            v[layer] = square if v[layer] is None else beta_2 * v[layer] + (1 - beta_2) * square
            new = g / (np.sqrt(v[layer]) + epsilon) + decay * weights[layer]
            m[layer] = beta_1 * m[layer] + (1 - beta_1 if averaging else 1) * new
            weights[layer] = weights[layer] - rate * m[layer]
    return weights


@pytest.mark.parametrize("backend", some(["jax", "torch", "tensorflow"], ["torch"]))
def test_novograd(ranks: Any, backend: str) -> None:
    job = make_job(lambda size: ranks(POOL, env_of(backend), "keras"), "horovod.keras")

    def check(folder: str) -> None:
        sys.path.insert(0, folder)
        try:
            from novograd import NovoGrad
        finally:
            sys.path.remove(folder)
        import keras

        import horovod.keras as hvd

        for arguments in (
            (0.05, 0.95, 0.98, 1e-8, 0.0, False),
            (0.02, 0.9, 0.5, 1e-3, 0.01, False),
            (0.1, 0.95, 0.25, 1e-8, 0.001, True),
        ):
            wanted = as_in_the_paper(*arguments)
            for distributed in (False, True):
                optimizer = NovoGrad.from_config(NovoGrad(*arguments).get_config())
                if distributed:
                    optimizer = hvd.DistributedOptimizer(optimizer)
                variables = [
                    keras.Variable(np.linspace(-1, 1, 6).reshape(3, 2).astype(np.float32)),
                    keras.Variable(np.array([0.5, -0.5], np.float32)),
                ]
                optimizer.build(variables)
                share = hvd.size() * (hvd.rank() + 1) / sum(range(1, hvd.size() + 1)) if distributed else 1.0
                for step in gradients():
                    mine = [keras.ops.convert_to_tensor((each * share).astype(np.float32)) for each in step]
                    optimizer.apply(mine, variables)
                for variable, value in zip(variables, wanted, strict=True):
                    np.testing.assert_allclose(variable.numpy(), value, rtol=2e-5, atol=2e-5)
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(NovoGrad(0.01)), loss="mse")
        x = np.random.default_rng(hvd.rank()).normal(size=(64, 4)).astype(np.float32)
        losses = model.fit(x, x.sum(axis=1, keepdims=True), epochs=40, batch_size=16, verbose=0).history["loss"]
        assert losses[-1] < 0.5 * losses[0], losses
        with np.testing.assert_raises_regex(ValueError, "beta_2"):
            NovoGrad(beta_2=1.0)

    job(2, check, str(EXAMPLE))
