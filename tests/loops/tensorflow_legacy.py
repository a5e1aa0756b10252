"""Loops with the optimizers of Keras 2 (tf_keras) and of TensorFlow 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loops.harness import Table

KERAS_2: Table[Any] = Table("Keras 2")
TENSORFLOW_1: Table[Any] = Table("TensorFlow 1's optimizers")
STEPS = 3
CHANGED = (
    r"the gradients of .* reached apply_gradients\(\) of the distributed optimizer .* changed since the backward pass"
)
ELSEWHERE = 1.0
"""The tolerance of loops that are wrong, and say so."""

Optimizer = Callable[[Any], Any]


def _new(side: Any) -> Any:
    return side.adam()


def _old(side: Any) -> Any:
    return side.tf.keras.optimizers.legacy.Adam(0.05)


def _sgd(side: Any) -> Any:
    return side.sgd(momentum=0.9)


def _looped(side: Any, step: Any, optimizer: Any, heads: int = 1) -> Any:
    """Train with ``step(optimizer, model, x, y)``."""
    model = side.Network(heads=heads)
    if hasattr(optimizer, "build"):
        optimizer.build(model.variables)
    compiled = side.step(lambda x, y: step(optimizer, model, x, y))
    for number in range(STEPS):
        compiled(*side.batch(number))
    return model


def _plain_tape(side: Any, make: Optimizer) -> Any:
    """A plain tape and apply_gradients of a distributed optimizer."""

    def step(optimizer: Any, model: Any, x: Any, y: Any) -> None:
        with side.tf.GradientTape() as tape:
            loss = model.loss(x, y)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.variables), model.variables, strict=True))

    return _looped(side, step, side.wrap(make(side)))


def _minimize(side: Any, make: Optimizer) -> Any:
    def step(optimizer: Any, model: Any, x: Any, y: Any) -> None:
        with side.tf.GradientTape() as tape:
            loss = model.loss(x, y)
        optimizer.minimize(loss, model.variables, tape=tape)

    return _looped(side, step, side.wrap(make(side)))


def _both(side: Any, make: Optimizer) -> Any:
    """A distributed tape with a clip, and a distributed optimizer."""
    tf = side.tf

    def step(optimizer: Any, model: Any, x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
        gradients, _ = tf.clip_by_global_norm(side.tape(tape).gradient(loss, model.variables), 0.1)
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))

    return _looped(side, step, side.wrap(make(side)))


def _reduced(side: Any, make: Optimizer) -> Any:
    tf = side.tf

    def step(optimizer: Any, model: Any, x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
        gradients = side.reduce(optimizer, tape.gradient(loss, model.variables), model.variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))

    return _looped(side, step, side.wrap(make(side)))


for _what, _of in {
    "a_plain_tape": _plain_tape,
    "minimize_with_a_tape": _minimize,
    "a_distributed_tape_and_a_clip": _both,
    "a_clip_of_reduced_gradients": _reduced,
}.items():
    for _kind, _make in {"new_adam": _new, "old_adam": _old}.items():

        def _loop(side: Any, of: Any = _of, make: Optimizer = _make) -> Any:
            return of(side, make)

        KERAS_2.add(f"{_what}_with_{_kind}", _loop)


def _own_clip(optimizer: Any, side: Any) -> Any:
    tf = side.tf

    def step(optimizer: Any, model: Any, x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, model.variables), 0.1)
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))

    return _looped(side, step, optimizer)


@KERAS_2.loop(warns=CHANGED, tolerance=ELSEWHERE)
def a_clip_of_each_ranks_own_gradients(side: Any) -> Any:
    return _own_clip(side.wrap(side.sgd()), side)


@KERAS_2.loop(warns=CHANGED)
def gradients_added_up_by_hand(side: Any) -> Any:
    tf = side.tf

    def step(optimizer: Any, model: Any, x: Any, y: Any) -> None:
        halves = []
        for part in range(2):
            with tf.GradientTape() as tape:
                loss = model.loss(x[part::2], y[part::2]) / 2
            halves.append(tape.gradient(loss, model.variables))
        gradients = [one + two for one, two in zip(*halves, strict=True)]
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))

    return _looped(side, step, side.wrap(_sgd(side)))


@KERAS_2.loop()
def fit(side: Any) -> Any:
    keras = side.tf.keras
    layers = [keras.layers.Dense(8, "tanh", input_shape=(6,)), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    model.set_weights([each.numpy() for each in side.Network().variables])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(side.wrap(side.adam(global_clipnorm=0.1)), loss, run_eagerly=not side.graph)
    for number in range(STEPS):
        model.train_on_batch(*side.batch(number))
    return model


@KERAS_2.loop()
def a_scaled_loss_around_a_distributed_optimizer(side: Any) -> Any:
    """With ``minimize``, as ``fit`` has it."""
    optimizer = side.tf.keras.mixed_precision.LossScaleOptimizer(
        side.wrap(side.sgd()), dynamic=False, initial_scale=1024
    )

    def step(optimizer: Any, model: Any, x: Any, y: Any) -> None:
        with side.tf.GradientTape() as tape:
            loss = model.loss(x, y)
        optimizer.minimize(loss, model.variables, tape=tape)

    return _looped(side, step, optimizer)


@KERAS_2.loop()
def several_passes_by_minimize(side: Any) -> Any:
    """Sums of two batches; one process has them of both at once."""
    tf, model = side.tf, side.Network()
    optimizer = side.wrap(side.sgd(), backward_passes_per_step=2)

    @side.step
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(x, y)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.variables), model.variables, strict=True))

    optimizer.build(model.variables)
    for number in range(0, 4, 2):
        batches = [side.batch(number), side.batch(number + 1)]
        if side.distributed:
            for batch in batches:
                step(*batch)
        else:
            with tf.GradientTape() as tape:
                loss = tf.add_n([model.loss(*batch) for batch in batches])
            optimizer.apply_gradients(zip(tape.gradient(loss, model.variables), model.variables, strict=True))
    return model


def _heads(side: Any, passes: int = 1) -> Any:
    """Each rank has a head of its own."""
    tf = side.tf
    optimizer = side.wrap(side.sgd(momentum=0.9), backward_passes_per_step=passes)
    model = side.Network(heads=2)
    optimizer.build(model.variables)
    for number in range(STEPS):
        x, y = side.batch(number)
        ranks = [side.rank] if side.distributed else range(side.size)
        for _ in range(passes if side.distributed else 1):
            with tf.GradientTape() as tape:
                parts = zip(tf.split(x, len(ranks)), tf.split(y, len(ranks)), ranks, strict=True)
                loss = tf.add_n([model.loss(*rows, rank % 2) for *rows, rank in parts]) / len(ranks)
                loss *= 1 if side.distributed else passes
            optimizer.apply_gradients(zip(tape.gradient(loss, model.variables), model.variables, strict=True))
    return model


@KERAS_2.loop(arguments={"modes": ("eager",)})
def each_its_own_head(side: Any) -> Any:
    return _heads(side)


@KERAS_2.loop(arguments={"modes": ("eager",)})
def each_its_own_head_over_several_passes(side: Any) -> Any:
    return _heads(side, 2)


def _first(side: Any) -> Any:
    """An optimizer of TensorFlow 1, distributed on a rank."""
    optimizer = side.tf.compat.v1.train.MomentumOptimizer(0.1, 0.9)
    return side.hvd.DistributedOptimizer(optimizer) if side.distributed else optimizer


@TENSORFLOW_1.loop()
def computed_clipped_and_applied(side: Any) -> Any:
    tf, model, optimizer = side.tf, side.Network(), _first(side)
    for number in range(STEPS):
        x, y = side.batch(number)
        pairs = optimizer.compute_gradients(lambda x=x, y=y: model.loss(x, y), model.variables)
        optimizer.apply_gradients([(tf.clip_by_norm(gradient, 0.05), of) for gradient, of in pairs])
    return model


@TENSORFLOW_1.loop()
def minimized(side: Any) -> Any:
    model, optimizer = side.Network(), _first(side)
    for number in range(STEPS):
        x, y = side.batch(number)
        optimizer.minimize(lambda x=x, y=y: model.loss(x, y), var_list=model.variables)
    return model


@TENSORFLOW_1.loop()
def a_plain_tape(side: Any) -> Any:
    def step(optimizer: Any, model: Any, x: Any, y: Any) -> None:
        with side.tf.GradientTape() as tape:
            loss = model.loss(x, y)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.variables), model.variables, strict=True))

    return _looped(side, step, _first(side))


@TENSORFLOW_1.loop(warns=CHANGED, tolerance=ELSEWHERE)
def a_plain_tape_and_a_clip(side: Any) -> Any:
    return _own_clip(_first(side), side)
