"""Loops of Keras 3 with copied optimizers, and with models that ``fit`` builds."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

from loops.harness import Table

TABLE: Table[Any] = Table("Keras copies")


def trained_with_a_copy(side: Any, copied: Callable[[Any], Any]) -> Any:
    optimizer = copied(side.wrap(side.adam()))
    return side.fitted(side.compiled(side.network(), optimizer))


TABLE.add(
    "an_optimizer_of_from_config",
    partial(trained_with_a_copy, copied=lambda optimizer: type(optimizer).from_config(optimizer.get_config())),
)
TABLE.add("an_optimizer_deep_copied_by_keras", partial(trained_with_a_copy, copied=copy.deepcopy))
TABLE.add(
    "an_optimizer_pickled_by_keras",
    partial(trained_with_a_copy, copied=lambda optimizer: pickle.loads(pickle.dumps(optimizer))),
    part=False,
)


@TABLE.loop(warns="The optimizer of the model, SGD, is not distributed", tolerance=1.0)
def an_optimizer_saved_with_its_model(side: Any) -> Any:
    """Each rank trains alone from here on, with the same rows."""
    keras = side.keras
    optimizer = keras.optimizers.deserialize(keras.optimizers.serialize(side.wrap(side.sgd())))
    model = side.compiled(side.network(), optimizer)
    x, y = side.data()
    x, y = x[:4] * 0, y[:4] * 0
    callbacks = [side.hvd.callbacks.BroadcastGlobalVariablesCallback(0)] if side.distributed else []
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=callbacks)
    return model


def built_by_fit(side: Any, eager: bool, parts: bool) -> Any:
    """Each rank's initial values are its own; those of rank 0 count."""
    keras = side.keras

    class Network(keras.Model):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.trunk = keras.layers.Dense(8, activation="tanh", name="trunk")
            self.head = keras.layers.Dense(3, name="head")
            if parts:
                self.body = keras.Sequential([self.trunk, self.head])

        def call(self, x: Any) -> Any:
            return self.body(x) if parts else self.head(self.trunk(x))

    keras.utils.set_random_seed(1 + side.rank)
    model = side.compiled(Network(), side.wrap(side.adam()), run_eagerly=eager)
    callbacks = [side.hvd.callbacks.BroadcastGlobalVariablesCallback(0)] if side.distributed else []
    return side.fitted(model, callbacks=callbacks)


for _eager in (False, True):
    TABLE.add(
        f"a_model_that_is_built_by_fit{'_eagerly' if _eager else ''}",
        partial(built_by_fit, eager=_eager, parts=False),
    )
TABLE.add("a_model_of_parts_that_is_built_by_fit", partial(built_by_fit, eager=False, parts=True), part=False)
