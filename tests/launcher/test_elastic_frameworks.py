"""Elastic jobs of TensorFlow and Keras lose ranks at several points: those that are left train to the end, and agree."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from launcher import elastic_faults
from launcher.elastic_faults import FIRST, LAST, Fault
from launcher.harness import RUN_SECONDS, Launcher
from part import some

pytest.importorskip("tensorflow")

STEPS = 16
COMMON = """
import hashlib, json, os, sys
from pathlib import Path
import numpy as np
import tensorflow as tf
import elastic_faults
folder, steps, process = Path(sys.argv[1]), int(sys.argv[2]), os.getpid()

def fault_point(name):
    elastic_faults.strike(name, hvd.rank(), hvd.size(), reached())

def finish(weights, error):
    assert os.getpid() == process
    digest = hashlib.sha256(b"".join(np.asarray(each).tobytes() for each in weights)).hexdigest()
    (folder / f"result.{process}").write_text(json.dumps([digest, hvd.rank(), hvd.size(), reached(), float(error)]))
"""

# All ranks have the same samples, so the average of their gradients does not depend on their number.
TAPE = """
import horovod.tensorflow as hvd

hvd.init()
tf.keras.utils.set_random_seed(1)

def make():
    layers = [tf.keras.Input((8,)), tf.keras.layers.Dense(16, activation="tanh"), tf.keras.layers.Dense(3)]
    return tf.keras.Sequential(layers), tf.keras.optimizers.SGD(0.05, momentum=0.9)

model, optimizer = make()
alone, plain = make()
samples = tf.random.stateless_normal((steps, 4, 8), seed=(1, 2))
alone.set_weights(model.get_weights())

def train_step(model, optimizer, x, wrap):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x)))
    gradients = wrap(tape).gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))

step = tf.function(lambda x: train_step(model, optimizer, x, hvd.DistributedGradientTape))
state = hvd.elastic.TensorFlowKerasState(model, optimizer, step=0)
reached = lambda: state.step
elastic_faults.where_ranks_meet(reached)
elastic_faults.before(hvd.elastic.TensorFlowKerasState, "check_host_updates", lambda _: fault_point("check"))

@hvd.elastic.run
def train(state):
    while state.step < steps:
        fault_point("forward")
        step(samples[state.step])
        state.step += 1
        state.commit()

initial = alone.get_weights()  # the same on all ranks, by the seed
train(state)
for x in samples:
    train_step(alone, plain, x, lambda tape: tape)
error = max(np.abs(a - b).max() for a, b in zip(model.get_weights(), alone.get_weights()))
finish(model.get_weights(), error)
"""

FIT = """
import keras
import horovod.keras as hvd

hvd.init()
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(96, 8)).astype("float32")
y = x.sum(axis=1, keepdims=True)
model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), loss="mse")
state = hvd.elastic.KerasState(model, batch=0, epoch=0)
reached = lambda: state.epoch * 4 + state.batch
elastic_faults.where_ranks_meet(reached)
elastic_faults.before(hvd.elastic.KerasState, "check_host_updates", lambda _: fault_point("check"))

class FaultPoints(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        fault_point("forward")

callbacks = [
    FaultPoints(),
    hvd.elastic.UpdateBatchStateCallback(state),
    hvd.elastic.UpdateEpochStateCallback(state),
    hvd.elastic.CommitStateCallback(state),
]

@hvd.elastic.run
def train(state):
    while state.epoch < steps // 4:
        mine = hvd.data.shard((x[state.batch * 24 :], y[state.batch * 24 :]))
        model.fit(
            *mine, batch_size=24 // hvd.size(), initial_epoch=state.epoch, epochs=state.epoch + 1, shuffle=False,
            verbose=0, callbacks=callbacks,
        )

before = np.square(model(x) - y).mean()
train(state)
finish(model.get_weights(), np.square(model(x) - y).mean() / before)
"""


TAPES = [Fault("allreduce", FIRST, 3), Fault("forward", LAST, 7), Fault("check", FIRST, 11)]
FITS = [Fault("forward", FIRST, 3), Fault("allreduce", LAST, 9)]
JOBS = [
    pytest.param(TAPE, "tcp", TAPES, 1e-5, id="tape"),
    pytest.param(FIT, "shm", FITS, 0.5, id="fit"),
]


@pytest.mark.parametrize(("script", "engine", "faults", "most"), some(JOBS, JOBS[:1]))
def test_the_remaining_ranks_agree_and_have_learned(
    launcher: Launcher, tmp_path: Path, script: str, engine: str, faults: list[Fault], most: float
) -> None:
    """``most``: the error of a tape's weights beside a training in one process; of a fit, beside the first model's."""
    shutil.copy(elastic_faults.__file__, tmp_path)
    elastic_faults.plan(tmp_path, faults)
    (tmp_path / "train.py").write_text(COMMON + script)
    settings = {"HOROVOD_CPU_OPERATIONS": engine, "FAULTS_FOLDER": str(tmp_path), "TF_CPP_MIN_LOG_LEVEL": "3"}
    words = ("-H", f"localhost:{2 + len(faults)}", "--min-np", "2", "python", "train.py", tmp_path, str(STEPS))
    process = launcher.start(*words, CUDA_VISIBLE_DEVICES="", **settings)
    _, errors = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 0, errors
    assert elastic_faults.struck(tmp_path) == len(faults), errors
    results = [json.loads(path.read_text()) for path in tmp_path.glob("result.*")]
    assert sorted((rank, size) for _, rank, size, *_ in results) == [(0, 2), (1, 2)]
    assert len({digest for digest, *_ in results}) == 1
    assert all(reached == STEPS and error < most for *_, reached, error in results)
