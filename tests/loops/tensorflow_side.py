"""The side of TensorFlow's loops, with Keras 3 or Keras 2 as ``tf.keras``: data, networks and optimizers, in float64.

The tables import no framework, so that they can be collected quickly: loops take all of it from their side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
from loops.harness import Outcome, Side, outcome

ROWS = 4
"""Rows of each rank in a batch."""
WIDTH, CLASSES = 6, 3


class TensorFlowSide(Side):
    """What TensorFlow's loops are given.

    Attributes:
        graph: steps are compiled with ``tf.function``.
    """

    tf = tf
    hvd = hvd

    def __init__(self, rank: int, size: int, distributed: bool, graph: bool) -> None:
        super().__init__(rank, size, distributed)
        self.graph = graph

    def step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, compiled if this side has graphs."""
        compiled: Callable[..., Any] = tf.function(function) if self.graph else function
        return compiled

    def tape(self, tape: Any, **options: Any) -> Any:
        """The tape; on a rank the distributed one."""
        return hvd.DistributedGradientTape(tape, **options) if self.distributed else tape

    def wrap(self, optimizer: Any, **options: Any) -> Any:
        """The optimizer; on a rank the distributed one."""
        return hvd_keras.DistributedOptimizer(optimizer, **options) if self.distributed else optimizer

    def reduce(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients, on a rank reduced by the tool for custom steps."""
        return hvd_keras.reduce_gradients(optimizer, gradients, variables) if self.distributed else list(gradients)

    def sgd(self, rate: float = 0.1, **options: Any) -> Any:
        return tf.keras.optimizers.SGD(rate, **options)

    def adam(self, rate: float = 0.05, **options: Any) -> Any:
        return tf.keras.optimizers.Adam(rate, **options)

    def batch(self, step: int) -> tuple[Any, Any]:
        """Inputs and classes of one step."""
        return self.rows(step), tf.constant(self.share(_drawn(step, 1).integers(CLASSES, size=ROWS * self.size)))

    def rows(self, step: int, width: int = WIDTH) -> Any:
        """Inputs of one step."""
        return tf.constant(self.share(_drawn(step, 2).normal(size=(ROWS * self.size, width))))


def _drawn(step: int, what: int) -> np.random.Generator:
    return np.random.default_rng(1000 * step + what)


class Dense:
    """A layer with a matrix and a bias."""

    def __init__(self, inputs: int, outputs: int, seed: int, name: str) -> None:
        drawn = np.random.default_rng(seed).normal(size=(inputs, outputs)) / np.sqrt(inputs)
        self.kernel = tf.Variable(drawn, name=f"{name}_kernel")
        self.bias = tf.Variable(np.zeros(outputs), name=f"{name}_bias")
        self.variables = [self.kernel, self.bias]

    def __call__(self, x: Any) -> Any:
        return x @ self.kernel + self.bias


class Network:
    """Two layers, or a trunk and several heads of equal shapes."""

    def __init__(self, seed: int = 1, inputs: int = WIDTH, outputs: int = CLASSES, heads: int = 1) -> None:
        self.trunk = Dense(inputs, 8, seed, "trunk")
        self.heads = [Dense(8, outputs, seed + 1 + head, f"head_{head}") for head in range(heads)]
        self.variables = [*self.trunk.variables, *(each for head in self.heads for each in head.variables)]

    def __call__(self, x: Any, head: int = 0) -> Any:
        return self.heads[head](tf.tanh(self.trunk(x)))

    def loss(self, x: Any, y: Any, head: int = 0) -> Any:
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=self(x, head)))


TensorFlowSide.Dense, TensorFlowSide.Network = Dense, Network  # type: ignore[attr-defined]


def values_of(found: Any) -> Iterator[Any]:
    """The values of variables, for the harness."""
    for variable in getattr(found, "variables", found):
        yield np.asarray(variable)


def both_sides(train: Callable[[TensorFlowSide], Any], graph: bool) -> tuple[Outcome | None, Outcome]:
    """Run a loop on this rank, and on rank 0 alone as well, before."""
    rank, size = hvd.rank(), hvd.size()

    def loop(side: TensorFlowSide) -> Iterator[Any]:
        return values_of(train(side))

    floats = tf.keras.backend.floatx()
    tf.keras.backend.set_floatx("float64")
    tf.keras.mixed_precision.set_global_policy("float64")
    try:
        alone = outcome(loop, TensorFlowSide(0, size, False, graph)) if rank == 0 else None
        return alone, outcome(loop, TensorFlowSide(rank, size, True, graph), end=hvd.shutdown)
    finally:
        tf.keras.backend.set_floatx(floats)
        tf.keras.mixed_precision.set_global_policy(floats)
