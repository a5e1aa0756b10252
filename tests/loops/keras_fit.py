"""Loops of Keras 3 that run on every backend: fit, train_on_batch, and training steps of one's own."""

from __future__ import annotations

from typing import Any

from loops.harness import Table

TABLE: Table[Any] = Table("Keras")
CHANGED = r"the gradients of .* reached apply\(\) of the distributed optimizer .* changed since the backward pass"
ELSEWHERE = 1.0
"""The tolerance of loops that are wrong, and say so."""


def _family(name: str, make: Any, **expected: Any) -> None:
    """A fit with an optimizer that ``make`` returns."""

    def loop(side: Any) -> Any:
        return side.fitted(side.compiled(side.network(), side.wrap(make(side))), steps=4)

    TABLE.add(name, loop, **expected)


_family("sgd_with_momentum", lambda side: side.sgd(momentum=0.9, nesterov=True))
_family("adam", lambda side: side.adam(), part=False)
_family("decoupled_weight_decay", lambda side: side.keras.optimizers.AdamW(0.05, weight_decay=0.1))
_family("a_clip_of_each_norm_by_the_optimizer", lambda side: side.sgd(clipnorm=0.05), part=False)
_family("a_clip_of_the_global_norm_by_the_optimizer", lambda side: side.adam(global_clipnorm=0.05))
_family("a_clip_of_values_by_the_optimizer", lambda side: side.sgd(clipvalue=0.01), part=False)
_family("moving_averages", lambda side: side.sgd(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2))
_family("gradients_added_up_by_keras", lambda side: side.adam(gradient_accumulation_steps=2))
_family("gradients_added_up_and_clipped", lambda side: side.sgd(gradient_accumulation_steps=2, global_clipnorm=0.05))
_family("lion", lambda side: side.keras.optimizers.Lion(0.01), part=False)
_family("rmsprop", lambda side: side.keras.optimizers.RMSprop(0.01), part=False)
_family("a_schedule", lambda side: side.sgd(side.keras.optimizers.schedules.CosineDecay(0.2, 4)))


@TABLE.loop()
def a_loss_that_is_scaled(side: Any) -> Any:
    optimizer = side.keras.optimizers.LossScaleOptimizer(side.wrap(side.adam()), initial_scale=2.0**10)
    return side.fitted(side.compiled(side.network(), optimizer, auto_scale_loss=False))


@TABLE.loop()
def backward_passes_per_step(side: Any) -> Any:
    """Sums of two batches, which one process makes with twice the rate."""
    rate = 0.05 if side.distributed else 0.1
    options = {} if side.distributed else {"gradient_accumulation_steps": 2}
    optimizer = side.wrap(side.sgd(rate, **options), backward_passes_per_step=2)
    return side.fitted(side.compiled(side.network(), optimizer), steps=4)


@TABLE.loop()
def frozen_at_first(side: Any) -> Any:
    model = side.network()
    model.get_layer("trunk").trainable = False
    side.fitted(side.compiled(model, side.wrap(side.adam())), steps=2)
    model.get_layer("trunk").trainable = True
    return side.fitted(side.compiled(model, side.wrap(side.adam(0.01))), steps=2, first=2)


@TABLE.loop()
def several_outputs_with_weights(side: Any) -> Any:
    keras = side.keras
    x = keras.Input((6,))
    hidden = keras.layers.Dense(8, activation="tanh")(x)
    heads = {name: keras.layers.Dense(3, name=name)(hidden) for name in ("one", "two")}
    model = side.initialized(keras.Model(x, heads))
    cross = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    weights = {"one": 1.0, "two": 0.3}
    side.compiled(model, side.wrap(side.adam()), {"one": cross, "two": cross}, loss_weights=weights)
    x, y = side.data()
    model.fit(x, {"one": y, "two": 2 - y}, batch_size=side.rows, shuffle=False, verbose=0)
    return model


@TABLE.loop()
def an_optimizer_for_each_layer(side: Any) -> Any:
    keras = side.keras
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        return side.fitted(side.compiled(side.network(), side.wrap(side.adam())))
    made = {"trunk": side.sgd(), "head": side.adam()}
    optimizer = keras.optimizers.MultiOptimizer(lambda variable: made["trunk" if "trunk" in variable.path else "head"])
    return side.fitted(side.compiled(side.network(), side.wrap(optimizer)))


@TABLE.loop()
def a_rate_that_a_callback_lowers(side: Any) -> Any:
    class Lower(side.keras.callbacks.Callback):  # type: ignore[name-defined, misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate = 0.1 / (epoch + 1)

    model = side.compiled(side.network(), side.wrap(side.sgd(momentum=0.9)))
    return side.fitted(model, epochs=3, callbacks=[Lower()])


@TABLE.loop()
def train_on_batch(side: Any) -> Any:
    model = side.compiled(side.network(), side.wrap(side.adam()))
    for step in range(3):
        model.train_on_batch(*side.data(1, step))
    return model


@TABLE.loop()
def a_penalty_on_the_weights(side: Any) -> Any:
    keras = side.keras
    model = side.initialized(
        keras.Sequential(
            [
                keras.layers.Input((6,)),
                keras.layers.Dense(8, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.1)),
                keras.layers.Dense(3, kernel_constraint=keras.constraints.MaxNorm(0.5)),
            ]
        )
    )
    return side.fitted(side.compiled(model, side.wrap(side.adam())))


@TABLE.loop()
def an_embedding(side: Any) -> Any:
    keras = side.keras
    words = keras.Input((4,), dtype="int32")
    hidden = keras.layers.Flatten()(keras.layers.Embedding(10, 3)(words))
    model = side.initialized(keras.Model(words, keras.layers.Dense(3)(hidden)))
    side.compiled(model, side.wrap(side.sgd(), sparse_as_dense=True))
    x, y = side.data()
    x = (abs(x[:, :4]) * 7).astype("int32") % 10
    model.fit(x, y, batch_size=side.rows, shuffle=False, verbose=0)
    return model


def _clip(ops: Any, gradients: Any) -> Any:
    norm = ops.sqrt(sum(ops.sum(each**2) for each in gradients))
    return [each * ops.minimum(0.1 / norm, 1.0) for each in gradients]


def _clip_values(ops: Any, gradients: Any) -> Any:
    return [ops.clip(each, -0.01, 0.01) for each in gradients]


def _signs(ops: Any, gradients: Any) -> Any:
    return [0.1 * ops.sign(each) for each in gradients]


def _centralized(ops: Any, gradients: Any) -> Any:
    """Linear: the mean over the rows is taken away."""
    return [each - ops.mean(each, axis=0, keepdims=True) if len(each.shape) > 1 else each for each in gradients]


def _same(ops: Any, gradients: Any) -> Any:
    return gradients


for _name, _change in {"clip": _clip, "clip_of_values": _clip_values, "sign": _signs}.items():

    def _reduced(side: Any, change: Any = _change) -> Any:
        return side.fitted(side.compiled(side.custom(side.network(), change, True), side.wrap(side.adam())))

    TABLE.add(f"a_{_name}_of_reduced_gradients", _reduced, part=_name != "sign")


def _own_clip(side: Any) -> Any:
    return side.fitted(side.compiled(side.custom(side.network(), _clip, False), side.wrap(side.sgd())))


TABLE.add("a_clip_of_each_ranks_own_gradients", _own_clip, warns=CHANGED, tolerance=ELSEWHERE)


def _linear(side: Any) -> Any:
    return side.fitted(side.compiled(side.custom(side.network(), _centralized, False), side.wrap(side.sgd())))


TABLE.add("a_linear_change_of_each_ranks_own_gradients", _linear, warns=CHANGED)


@TABLE.loop()
def a_step_of_ones_own_that_changes_nothing(side: Any) -> Any:
    return side.fitted(side.compiled(side.custom(side.network(), _same, False), side.wrap(side.adam())))


@TABLE.loop()
def a_clip_of_reduced_sums(side: Any) -> Any:
    def scaled(side: Any, network: Any, x: Any, y: Any) -> Any:
        from loops.keras_side import cross_entropy

        return cross_entropy(side, network, x, y) / (side.size if side.distributed else 1)

    optimizer = side.wrap(side.sgd(), op=side.hvd.Sum)
    return side.fitted(side.compiled(side.custom(side.network(), _clip, True, scaled), optimizer))


@TABLE.loop()
def a_clip_of_reduced_gradients_that_keras_adds_up(side: Any) -> Any:
    optimizer = side.wrap(side.adam(gradient_accumulation_steps=2))
    return side.fitted(side.compiled(side.custom(side.network(), _clip, True), optimizer), steps=4)


@TABLE.loop()
def a_clip_of_reduced_gradients_with_moving_averages(side: Any) -> Any:
    optimizer = side.wrap(side.sgd(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2))
    return side.fitted(side.compiled(side.custom(side.network(), _clip, True), optimizer))


@TABLE.loop()
def layers_that_stay_on_each_rank_alone(side: Any) -> Any:
    """The head is local, with all ranks' data alike; the trunk is shared."""
    optimizer = side.sgd()
    model = side.network()
    if side.distributed:
        local = side.hvd.PartialDistributedOptimizer
        optimizer = local(optimizer, local_layers=model.get_layer("head"), scale_local_gradients=False)
    x, y = side.data(3)
    x, y = x[:4], y[:4]
    if side.distributed:
        x, y = side.hvd.broadcast(x, 0), side.hvd.broadcast(y, 0)
        x, y = side.ops.convert_to_numpy(x), side.ops.convert_to_numpy(y)
    side.compiled(model, optimizer)
    model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0)
    return model


@TABLE.loop()
def two_models_in_turns(side: Any) -> Any:
    models = [side.network(1), side.network(5)]
    for model in models:
        side.compiled(model, side.wrap(side.adam()))
    for step in range(4):
        models[step % 2].train_on_batch(*side.data(1, step))
    return models


@TABLE.loop()
def a_model_taught_by_another(side: Any) -> Any:
    """Distillation: the teacher's logits are part of the loss."""
    teacher = side.network(9)
    teacher.trainable = False

    def loss(side: Any, network: Any, x: Any, y: Any) -> Any:
        from loops.keras_side import cross_entropy

        return cross_entropy(side, network, x, y) + side.ops.mean((network(x) - teacher(x)) ** 2)

    return side.fitted(side.compiled(side.custom(side.network(), _clip, True, loss), side.wrap(side.adam())))
