"""Loops of Keras 3 on TensorFlow and PyTorch, in which ranks have gradients of different variables. JAX has no missing ones."""

from __future__ import annotations

from typing import Any

from loops.harness import Table

TABLE: Table[Any] = Table("Keras's heads")
STEPS = 3


def _trained(side: Any, head_of: Any, optimizer: Any, clip: bool = False, count: int = 2) -> Any:
    """Train a trunk and heads. In one process each rank's rows take the head that this rank chooses."""
    keras, ops = side.keras, side.ops
    layers = [keras.layers.Dense(8, activation="tanh", name="trunk")]
    layers += [keras.layers.Dense(3, name=f"head_{head}") for head in range(count)]
    inputs = keras.Input((6,))
    hidden = layers[0](inputs)
    network = side.initialized(keras.Model(inputs, [head(hidden) for head in layers[1:]]))
    number = [0]

    def loss(side: Any, network: Any, x: Any, y: Any) -> Any:
        ranks = [side.rank] if side.distributed else range(side.size)
        hidden, losses = layers[0](x), []
        for index, rank in enumerate(ranks):
            rows = slice(4 * index, 4 * index + 4)
            logits = layers[1 + head_of(number[0], rank)](hidden[rows])
            losses.append(keras.losses.sparse_categorical_crossentropy(y[rows], logits, from_logits=True))
        return ops.mean(ops.concatenate(losses))

    def change(ops: Any, gradients: Any) -> Any:
        if not clip:
            return gradients
        norm = ops.sqrt(sum(ops.sum(each**2) for each in gradients if each is not None))
        return [None if each is None else each * ops.minimum(0.05 / norm, 1.0) for each in gradients]

    model = side.compiled(side.custom(network, change, clip, loss), side.wrap(optimizer))
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    for step in range(STEPS):
        number[0] = step
        model.train_on_batch(*side.data(1, step))
    return network


def each_its_own(step: int, rank: int) -> int:
    return rank % 2


def drawn(step: int, rank: int) -> int:
    return [[0, 0, 1], [1, 2, 0], [2, 2, 2]][step][rank]


@TABLE.loop()
def each_its_own_head(side: Any) -> Any:
    return _trained(side, each_its_own, side.adam())


@TABLE.loop()
def each_its_own_head_with_momentum(side: Any) -> Any:
    return _trained(side, each_its_own, side.sgd(momentum=0.9))


@TABLE.loop()
def drawn_heads(side: Any) -> Any:
    """What no rank has in a step stays as it is, momentum included."""
    return _trained(side, drawn, side.adam(), count=3)


@TABLE.loop()
def each_its_own_head_and_a_clip(side: Any) -> Any:
    return _trained(side, each_its_own, side.adam(), clip=True)


@TABLE.loop()
def drawn_heads_and_a_clip(side: Any) -> Any:
    return _trained(side, drawn, side.adam(), clip=True, count=3)
