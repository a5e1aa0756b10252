"""The side of Keras 3's loops, on TensorFlow, PyTorch or JAX: data, models and training steps, in float64.

The tables import no framework, so that they can be collected quickly: loops take all of it from their side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

import horovod.keras as hvd
from loops.harness import Outcome, Side, outcome

ROWS = 4
"""Rows of each rank in a batch."""
WIDTH, CLASSES = 6, 3
BACKEND = keras.backend.backend()


class KerasSide(Side):
    """What Keras's loops are given.

    Attributes:
        backend: its name.
        eager: models run their steps eagerly.
    """

    keras, ops, hvd, backend = keras, ops, hvd, BACKEND

    def __init__(self, rank: int, size: int, distributed: bool, eager: bool) -> None:
        super().__init__(rank, size, distributed)
        self.eager = eager

    def wrap(self, optimizer: Any, **options: Any) -> Any:
        """The optimizer; on a rank the distributed one."""
        return hvd.DistributedOptimizer(optimizer, **options) if self.distributed else optimizer

    def sgd(self, rate: Any = 0.1, **options: Any) -> Any:
        return keras.optimizers.SGD(rate, **options)

    def adam(self, rate: Any = 0.05, **options: Any) -> Any:
        return keras.optimizers.Adam(rate, **options)

    def data(self, steps: int = 3, first: int = 0) -> tuple[Any, Any]:
        """Inputs and classes of several steps, in the order of the steps."""
        every = [self._batch(step) for step in range(first, first + steps)]
        return np.concatenate([self.share(x) for x, _ in every]), np.concatenate([self.share(y) for _, y in every])

    def _batch(self, step: int) -> tuple[Any, Any]:
        drawn, rows = np.random.default_rng(1000 * step + 1), ROWS * self.size
        return drawn.normal(size=(rows, WIDTH)), drawn.integers(CLASSES, size=rows)

    @property
    def rows(self) -> int:
        """The rows of a batch on this side."""
        return ROWS if self.distributed else ROWS * self.size

    def network(self, seed: int = 1, outputs: int = CLASSES, width: int = WIDTH) -> Any:
        """Two layers with names and values that are the same on all ranks."""
        model = keras.Sequential(
            [
                keras.layers.Input((width,)),
                keras.layers.Dense(8, activation="tanh", name="trunk"),
                keras.layers.Dense(outputs, name="head"),
            ]
        )
        return self.initialized(model, seed)

    def initialized(self, model: Any, seed: int = 1) -> Any:
        """The model, with weights of a seed."""
        drawn = np.random.default_rng(seed)
        model.set_weights([drawn.normal(size=each.shape) / 2 for each in model.get_weights()])
        return model

    def compiled(self, model: Any, optimizer: Any, loss: Any = None, **options: Any) -> Any:
        """The model, compiled with an optimizer that was wrapped before."""
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True) if loss is None else loss
        options = {"jit_compile": False if BACKEND != "jax" else "auto", "run_eagerly": self.eager, **options}
        model.compile(optimizer=optimizer, loss=loss, **options)
        return model

    def fitted(self, model: Any, steps: int = 3, first: int = 0, **options: Any) -> Any:
        """The model, after a fit of some steps."""
        x, y = self.data(steps, first)
        model.fit(x, y, batch_size=self.rows, shuffle=False, verbose=0, **options)
        return model

    def custom(
        self, network: Any, change: Callable[[Any, list[Any]], Sequence[Any]], reduced: bool, loss: Any = None
    ) -> Any:
        """A model with a training step of its own, which changes gradients before it applies them.

        Args:
            change: of ``keras.ops`` and the gradients. Returns the changed ones.
            reduced: the gradients are first reduced with the tool for such steps.
            loss: of the side, the network, inputs and classes; the mean cross-entropy.
        """
        return _Custom(self, network, change, reduced, loss or cross_entropy)


def cross_entropy(side: Any, network: Any, x: Any, y: Any) -> Any:
    return ops.mean(keras.losses.sparse_categorical_crossentropy(y, network(x), from_logits=True))


class _Custom(keras.Model):  # type: ignore[misc]  # untyped base
    """``train_step`` as in Keras's guides, on each backend."""

    def __init__(self, side: KerasSide, network: Any, change: Any, reduced: bool, loss: Any) -> None:
        super().__init__()
        self.network, self._own = network, (side, change, reduced, loss)
        self.build((None, WIDTH))

    def build(self, shape: Any) -> None:
        self.built = True

    def call(self, x: Any) -> Any:
        outputs = self.network(x)
        return outputs[0] if isinstance(outputs, list) else outputs

    def _changed(self, gradients: Sequence[Any]) -> Any:
        side, change, reduced, _ = self._own
        if reduced and side.distributed:
            gradients = hvd.reduce_gradients(self.optimizer, gradients, self.trainable_variables)
        return change(ops, list(gradients))

    def _loss(self, x: Any, y: Any) -> Any:
        side, *_, loss = self._own
        return loss(side, self.network, x, y)

    if BACKEND == "tensorflow":

        def train_step(self, data: Any) -> Any:
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = self._loss(*data[:2])
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(self._changed(gradients), self.trainable_variables, strict=True))
            return {"loss": loss}

    elif BACKEND == "torch":

        def train_step(self, data: Any) -> Any:
            import torch

            self.zero_grad()
            loss = self._loss(*data[:2])
            loss.backward()
            variables = list(self.trainable_weights)
            with torch.no_grad():
                gradients = self._changed([each.value.grad for each in variables])
                self.optimizer.apply(gradients, variables)
            return {"loss": loss}

    else:

        def train_step(self, state: Any, data: Any) -> Any:
            import jax

            trainable, other, of_optimizer, metrics = state

            def loss_of(trainable: Any) -> Any:
                mapping = [
                    *zip(self.trainable_variables, trainable, strict=True),
                    *zip(self.non_trainable_variables, other, strict=True),
                ]
                with keras.StatelessScope(state_mapping=mapping):
                    return self._loss(*data[:2])

            loss, gradients = jax.value_and_grad(loss_of)(trainable)
            gradients = self._changed(gradients)
            trainable, of_optimizer = self.optimizer.stateless_apply(of_optimizer, gradients, trainable)
            return {"loss": loss}, (trainable, other, of_optimizer, metrics)


def values_of(found: Any) -> Iterator[Any]:
    """The trained values of models or variables, for the harness."""
    if hasattr(found, "trainable_variables") or hasattr(found, "numpy"):
        found = [found]
    for each in found:
        for variable in each.weights if hasattr(each, "weights") else [each]:
            yield keras.ops.convert_to_numpy(variable)


def both_sides(train: Callable[[KerasSide], Iterable[Any]], eager: bool) -> tuple[Outcome | None, Outcome]:
    """Run a loop on this rank, and on rank 0 alone as well, before."""
    rank, size = hvd.rank(), hvd.size()

    def loop(side: KerasSide) -> Iterator[Any]:
        keras.utils.clear_session(free_memory=False)
        return values_of(train(side))

    if BACKEND == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)
    floats = keras.config.floatx()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        alone = outcome(loop, KerasSide(0, size, False, eager)) if rank == 0 else None
        return alone, outcome(loop, KerasSide(rank, size, True, eager), end=hvd.shutdown)
    finally:
        keras.config.set_floatx(floats)
        keras.config.set_dtype_policy(floats)
        if BACKEND == "jax":
            jax.config.update("jax_enable_x64", False)
