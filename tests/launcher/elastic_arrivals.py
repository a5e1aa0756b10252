"""One rank of the jobs of ``test_elastic_arrivals.py``: a job of two ranks grows to three, with all states of one framework.

    elastic_arrivals.py FOLDER WAY

Before ``hvd.elastic.run`` it makes each state of the way, synchronises it, and broadcasts parameters. In a process that joins,
no other rank takes part in that. What the rank has in the end is in ``result.NUMBER`` of the folder.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

NUMBER = os.environ.get("HOROVOD_ELASTIC_PROCESS", "")
STEPS = 4
"""After the process has joined."""


class Made(NamedTuple):
    """A state, and its contents: how to assign a number to all, and how to read them."""

    state: Any
    assign: Callable[[float], object]
    read: Callable[[], list[float]]


def own() -> float:
    """A first value that differs from process to process."""
    return -1.0 - int(NUMBER)


def of_objects(state: Any) -> Made:
    return Made(state, lambda value: setattr(state, "value", value), lambda: [state.value])


def plain() -> Made:
    from horovod._bindings.objects import broadcast_object
    from horovod.common import basics
    from horovod.common.elastic import ObjectState

    return of_objects(ObjectState(broadcast_object, basics.rank, value=own()))


def torch_state() -> Made:
    import torch

    import horovod.torch as hvd

    model = torch.nn.Linear(2, 2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    state = hvd.elastic.TorchState(model, optimizer, value=own())

    def assign(value: float) -> None:
        state.value = value
        with torch.no_grad():
            for each in model.parameters():
                each.fill_(value)

    assign(own())
    return Made(state, assign, lambda: [state.value, *torch.cat([p.flatten() for p in model.parameters()]).tolist()])


def variables_state() -> Made:
    import tensorflow as tf

    import horovod.tensorflow as hvd

    variable = tf.Variable([own(), own()])

    @tf.function
    def broadcast() -> None:
        hvd.broadcast_variables([variable], root_rank=0)

    for _ in range(2):
        broadcast()
    hvd.broadcast_variables([variable], root_rank=0)
    hvd.broadcast_variables([variable], root_rank=0, inplace=True)
    assert NUMBER != "2" or variable.numpy().tolist() == [own(), own()]
    state = hvd.elastic.TensorFlowState([variable], value=own())

    def assign(value: float) -> None:
        state.value = value
        variable.assign([value, value])

    return Made(state, assign, lambda: [state.value, *variable.numpy().tolist()])


def model_state(module: str, keras_module: str) -> Made:
    import importlib

    hvd = importlib.import_module(module)
    keras = __import__("tensorflow").keras if keras_module == "tf.keras" else importlib.import_module(keras_module)
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), loss="mse")
    kind = "KerasState" if hasattr(hvd.elastic, "KerasState") else "TensorFlowKerasState"
    state = getattr(hvd.elastic, kind)(model, value=own())

    def assign(value: float) -> None:
        state.value = value
        model.set_weights([np.full(each.shape, value, np.float32) for each in model.get_weights()])

    assign(own())
    state.save()
    return Made(
        state, assign, lambda: [state.value, *[x for each in model.get_weights() for x in each.ravel().tolist()]]
    )


KERAS = "horovod.keras.elastic.KerasState"
OF_TF_KERAS = "horovod.tensorflow.keras.elastic.KerasState"
OF_A_MODEL = "horovod.tensorflow.elastic.TensorFlowKerasState"
OF_VARIABLES = "horovod.tensorflow.elastic.TensorFlowState"


def in_keras(backend: str) -> tuple[dict[str, str], dict[str, Callable[[], Made]]]:
    return {"KERAS_BACKEND": backend}, {KERAS: lambda: model_state("horovod.keras", "keras")}


WAYS: dict[str, tuple[dict[str, str], dict[str, Callable[[], Made]]]] = {
    "plain": ({}, {"horovod.elastic.state.ObjectState": plain}),
    "torch": ({}, {"horovod.torch.elastic.state.TorchState": torch_state}),
    "tensorflow": (
        {"KERAS_BACKEND": "tensorflow"},
        {
            OF_VARIABLES: variables_state,
            OF_A_MODEL: lambda: model_state("horovod.tensorflow", "tf.keras"),
            OF_TF_KERAS: lambda: model_state("horovod.tensorflow.keras", "tf.keras"),
            KERAS: lambda: model_state("horovod.keras", "keras"),
        },
    ),
    "tf_keras": (
        {"TF_USE_LEGACY_KERAS": "1"},
        {
            OF_A_MODEL: lambda: model_state("horovod.tensorflow", "tf.keras"),
            OF_TF_KERAS: lambda: model_state("horovod.tensorflow.keras", "tf.keras"),
        },
    ),
    "keras on torch": in_keras("torch"),
    "keras on jax": in_keras("jax"),
}
"""The variables of each way to import a framework, and the states there with what makes them."""


def main() -> None:
    from horovod._bindings.objects import allgather_object, broadcast_object
    from horovod.common import basics
    from horovod.common.elastic import Reset, State, run_fn

    basics.init()
    made = []
    for name, make in WAYS[sys.argv[2]][1].items():
        made.append(make())
        kind = type(made[-1].state)
        assert name == f"{kind.__module__}.{kind.__name__}"
        made[-1].state.sync()

    class Every(State):
        """All of them, as a script may write it."""

        step = saved = 0

        def save(self) -> None:
            self.saved = self.step
            for each in made:
                each.state.save()

        def restore(self) -> None:
            self.step = self.saved
            for each in made:
                each.state.restore()

        def sync(self) -> None:
            for each in made:
                each.state.sync()
            self.step = self._bcast_object(self.step)
            self.save()

    every = Every(broadcast_object, basics.rank)
    every.sync()
    first = [each.read() for each in made]

    def train(state: Every) -> list[float]:
        began = [each.read() for each in made]
        ends = 0
        while not ends or state.step < ends:
            if basics.rank() == 0 and state.step == 2:
                (Path(sys.argv[1]) / "hosts").write_text("localhost:3\n")
            sizes = allgather_object(basics.size())
            state.step += 1
            time.sleep(0.01)  # the process that joins has to import a framework
            for each in made:
                each.assign(float(state.step))
            ends = ends or (state.step + STEPS if sizes == [3, 3, 3] else 0)
            state.commit()
        return began

    began = run_fn(train, Reset(basics.shutdown, basics.init))(every)
    ended = [each.read() for each in made]
    (Path(sys.argv[1]) / f"result.{NUMBER}").write_text(json.dumps([basics.size(), every.step, first, began, ended]))


if __name__ == "__main__":
    main()
