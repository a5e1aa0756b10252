"""``LocalTrainingCallback`` in a real ``fit`` on every backend: equal to DiLoCo in NumPy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import diloco
from diloco import Case
from keras_ranks import POOL

CASE = Case("aab"[:POOL], 4, 2, 0, 11, 0.7, 0.9, True, 0.0)


def fitted(case: Case, halves: bool = False) -> tuple[diloco.Parameters, dict[str, int]]:
    """The trained parameters, and the fragment of each. The job begins anew, with ranks on the hosts of the case."""
    import os

    import keras

    import horovod.keras as hvd
    from horovod._base import config

    hvd.shutdown()
    rank = int(os.environ[config.RANK])
    before, os.environ[config.HOSTNAME] = os.environ[config.HOSTNAME], case.hosts[rank]
    try:
        hvd.init()

        class Reference(keras.layers.Layer):  # type: ignore[misc]  # Keras is untyped
            def build(self, shape: Any) -> None:
                for name, value in diloco.beginning().items():
                    setattr(self, name, self.add_weight(shape=value.shape, name=name, initializer="zeros"))
                super().build(shape)

            def call(self, x: Any) -> Any:
                return (keras.ops.matmul(x * self.scale, self.weight) + self.bias) * self.gain

        def made() -> Any:
            model = keras.Sequential([keras.layers.Input((diloco.INPUTS,)), Reference()])
            model.set_weights([each.astype(np.float32) for each in diloco.beginning().values()])
            inner = keras.optimizers.SGD(diloco.INNER_LR, momentum=diloco.INNER_MOMENTUM)
            model.compile(hvd.DistributedOptimizer(inner, process_set=hvd.host_process_set()), loss="mse")
            return model

        def callback() -> Any:
            outer = hvd.OuterSGD(case.lr, case.momentum, case.nesterov)
            compression = hvd.Compression.fp16 if halves else None
            return hvd.callbacks.LocalTrainingCallback(
                case.every, outer, case.fragments, case.delay, compression, case.mixing
            )

        seen: list[list[Any]] = []

        class Look(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                if batch + 1 == case.steps:
                    if hasattr(self.model, "jax_state_sync"):
                        self.model.jax_state_sync()
                    seen.append([np.array(each) for each in self.model.get_weights()])

        data = [diloco.batch(step, rank) for step in range(1, case.steps + 1)]
        x, y = (np.concatenate(each).astype(np.float32) for each in zip(*data, strict=True))
        model, local = made(), callback()
        model.fit(
            x, y, batch_size=diloco.BATCH, shuffle=False, verbose=0,
            callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), local, Look()],
        )  # fmt: skip
        names = list(diloco.beginning())
        fragments = {names[int(place)]: each["fragment"] for place, each in local.state_dict()["parameters"].items()}
        for number, each in enumerate(model.get_weights()):
            assert np.array_equal(each, np.asarray(hvd.broadcast(each, 0, name=f"final.{number}"))), names[number]
        return {name: value.astype(np.float64) for name, value in zip(names, seen[0], strict=True)}, fragments
    finally:
        hvd.shutdown()
        os.environ[config.HOSTNAME] = before


@pytest.mark.parametrize(
    "case", [CASE, replace(CASE, delay=2, mixing=0.5), replace(CASE, hosts="abc"[:POOL], fragments=4)]
)
def test_fit_trains_as_diloco_in_numpy(job: Any, case: Case) -> None:
    found = job(POOL, fitted, case)
    wanted = diloco.train(case, found[0][1])
    for rank, (parameters, fragments) in enumerate(found):
        assert fragments == found[0][1]
        assert diloco.distance(parameters, wanted[case.hosts[rank]]) < 1e-4, rank


def test_changes_travel_in_16_bits(job: Any) -> None:
    for rank, (parameters, fragments) in enumerate(job(POOL, fitted, CASE, True)):
        assert 0 < diloco.distance(parameters, diloco.train(CASE, fragments)[CASE.hosts[rank]]) < 1e-2


def test_what_cannot_be_trained_locally_is_refused(job: Any) -> None:
    def check() -> None:
        import keras

        import horovod.keras as hvd

        make = hvd.callbacks.LocalTrainingCallback
        for wrong in (
            {"every": 0},
            {"delay": 50},
            {"outer": keras.optimizers.SGD()},
            {"compression": 8},
            {"mixing": 1.0},
        ):
            with pytest.raises(ValueError):
                make(**wrong)
        x = np.zeros((8, 2), np.float32)
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        with pytest.raises(ValueError, match="has 2 trainable variables"):
            model.fit(x, x[:, :1], verbose=0, callbacks=[make()])
        model.compile("sgd", "mse", steps_per_execution=2)
        with pytest.raises(ValueError, match="steps_per_execution"):  # Keras on PyTorch refuses it, too
            model.fit(x, x[:, :1], verbose=0, batch_size=2, callbacks=[make(fragments=2)])

    job(1, check)
