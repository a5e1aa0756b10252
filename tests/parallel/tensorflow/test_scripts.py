"""Whole scripts: how processes begin and end under ``horovodrun``, and what a script switches for its whole process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import horovod
from keras_ranks import env_of
from launcher.harness import EAGER
from parallel.tensorflow.conftest import QUIET
from ranks import RankPool
from time_limits import SOON

SOURCE = Path(horovod.__file__).resolve().parents[1]


def run(tmp_path: Path, script: str, *launcher: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a script's text, under horovodrun if there are arguments for it."""
    path = tmp_path / "script.py"
    path.write_text(script)
    env = {name: value for name, value in os.environ.items() if "HOROVOD" not in name and "NUM_THREADS" not in name}
    command = [sys.executable, "-m", "horovod.runner.launch", *launcher] if launcher else []
    return subprocess.run(
        [*command, sys.executable, str(path)],
        env={**env, **QUIET, "PYTHONPATH": os.pathsep.join([str(SOURCE), EAGER]), **extra},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SOON,
    )


def play(pool: RankPool, path: Path, script: str) -> list[str]:
    """Run a script's text in new ranks, which have imported the framework before; what each printed.

    The ranks end afterwards: what the script has switched is not for other tests.
    """

    def main(path: str) -> None:
        import runpy

        runpy.run_path(path, run_name="__main__")

    path.write_text(script)
    pool.restart()
    try:
        pool.run(main, str(path))
        return [pool.output(rank) for rank in range(pool.size)]
    finally:
        pool.close()


PENDING = """
import os, threading, time
import keras
import tensorflow as tf
import horovod.keras
import horovod.tensorflow as hvd

hvd.init()
optimizer = horovod.keras.DistributedOptimizer(keras.optimizers.SGD(0.1))
assert float(tf.function(lambda: hvd.allreduce(tf.constant(1.0), op=hvd.Sum))()) == 2.0
print("threads", os.environ["TF_NUM_INTRAOP_THREADS"], os.environ["TF_NUM_INTEROP_THREADS"])
waiting = tf.function(lambda: hvd.allreduce(tf.constant(1.0), name=f"only.{hvd.rank()}"))
threading.Thread(target=waiting, daemon=True).start()
time.sleep(0.5)
print("the end of the script")
"""


def test_a_process_may_end_while_a_graph_runs(tmp_path: Path) -> None:
    done = run(tmp_path, PENDING, "-np", "2", PYTHONPATH=str(SOURCE))
    assert done.stdout.count("the end of the script") == 2, done.stderr
    assert done.returncode == 0 and "Exception ignored" not in done.stderr, done.stderr
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert done.stdout.count(f"threads {share} {share}") == 2, done.stdout


AUTOGRAPH = """
import tensorflow as tf
import horovod.tensorflow as hvd

hvd.init()

@tf.function
def train(steps):
    total = tf.constant(0.0)
    for step in tf.range(steps):
        if step % 2 == 0:
            total += hvd.allreduce(tf.cast(step, tf.float32), op=hvd.Sum)
        else:
            total -= hvd.allgather(tf.ones([hvd.rank() + 1]) * 2)[0]
    return total

print("threads", tf.config.threading.get_inter_op_parallelism_threads(), "total", float(train(tf.constant(6))))
"""


def test_python_loops_and_branches_are_converted_by_autograph_without_complaint(ranks: Any, tmp_path: Path) -> None:
    for told in play(ranks(2, QUIET, "tensorflow"), tmp_path / "script.py", AUTOGRAPH):
        assert "threads 1" in told and "total 6.0" in told, told
        assert "AutoGraph" not in told


def test_tensorflow_and_pytorch_share_one_runtime_in_a_process(tmp_path: Path) -> None:
    script = """
import torch
import tensorflow as tf
import horovod.torch as first
import horovod.tensorflow as second

second.init()
assert first.size() == second.size() == 1
assert first.allreduce(torch.ones(3)).tolist() == second.allreduce(tf.ones([3])).numpy().tolist() == [1, 1, 1]
print("both")
"""
    done = run(tmp_path, script)
    assert done.returncode == 0 and "both" in done.stdout, done.stderr


def test_importing_without_tensorflow_says_what_to_install(tmp_path: Path) -> None:
    script = """
import sys
sys.modules["tensorflow"] = None
import horovod.tensorflow
"""
    done = run(tmp_path, script)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: horovod.tensorflow needs TensorFlow 2.16 or newer")
    assert "pip install '.[tensorflow]'" in last


def keras_2(ranks: Any) -> RankPool:
    return ranks(2, env_of("tensorflow", 2), "tensorflow.keras")


TENSORFLOW_1 = """
import numpy as np
import tensorflow as tf
import horovod.tensorflow as hvd

tf.compat.v1.disable_eager_execution()
hvd.init()
layer = hvd.SyncBatchNormalization(momentum=0.0)
x = tf.compat.v1.placeholder(tf.float32, [None, 1])
y = layer(x, training=True)
updates = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.UPDATE_OPS)
with tf.compat.v1.Session() as session:
    session.run(tf.compat.v1.global_variables_initializer())
    session.run([y, *updates], {x: np.array([[1.0], [2.0]]) + 4 * hvd.rank()})
    print("updates", len(updates), "mean", session.run(layer.moving_mean))
"""


def test_moving_statistics_are_among_the_updates_of_a_graph_of_tensorflow_1(ranks: Any, tmp_path: Path) -> None:
    for told in play(keras_2(ranks), tmp_path / "script.py", TENSORFLOW_1):
        assert "updates 2 mean [3.5]" in told, told


LIFE = """
import importlib, os, threading
os.environ.update(OMP_NUM_THREADS="3", TF_NUM_INTEROP_THREADS="2")
import tensorflow as tf

hvd = importlib.import_module(MODULE)
hvd.init()
kept = tf.config.threading
print("threads", kept.get_intra_op_parallelism_threads(), kept.get_inter_op_parallelism_threads())
assert float(tf.function(lambda: hvd.allreduce(tf.constant(2.0)))()) == 2.0
hvd.shutdown()
print("left", [thread.name for thread in threading.enumerate() if "horovod" in thread.name])
"""


@pytest.mark.parametrize("module", ["horovod.tensorflow", "horovod.tensorflow.keras", "horovod.keras"])
def test_every_binding_starts_and_ends_alike(ranks: Any, tmp_path: Path, module: str) -> None:
    """The threads that the user gives each rank are TensorFlow's, unless told otherwise; none stays behind."""
    for told in play(ranks(2, QUIET, "tensorflow"), tmp_path / "script.py", LIFE.replace("MODULE", repr(module))):
        assert "threads 3 0" in told and "left []" in told, told


KERAS_IN_A_SESSION = """
import numpy as np
import tensorflow as tf
import horovod.tensorflow.keras as hvd

tf.compat.v1.disable_eager_execution()
hvd.init()
session = tf.compat.v1.Session(config=tf.compat.v1.ConfigProto())
tf.compat.v1.keras.backend.set_session(session)
keras = tf.keras
model = keras.Sequential([keras.layers.Dense(2, input_shape=(3,))])
model.compile(hvd.DistributedOptimizer(keras.optimizers.legacy.SGD(0.1, momentum=0.5)), "mse")
x = np.random.default_rng(hvd.rank()).normal(size=(8, 3))
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1, warmup_epochs=1),
    hvd.callbacks.LearningRateScheduleCallback(initial_lr=0.1, multiplier=0.5, start_epoch=1),
]
history = model.fit(x, x[:, :2], batch_size=4, epochs=3, verbose=0, callbacks=callbacks).history
ours = np.concatenate([weight.reshape(-1) for weight in model.get_weights()])
both = hvd.allgather(ours[None])
assert both.shape == (2, ours.size) and (both[0] == both[1]).all(), both
print("rates", np.round(history["lr"], 6).tolist(), hvd.allreduce(1.0 + hvd.rank()), hvd.broadcast(hvd.rank(), 1))
"""


def test_callbacks_of_keras_2_work_in_a_session_of_tensorflow_1(ranks: Any, tmp_path: Path) -> None:
    for told in play(keras_2(ranks), tmp_path / "script.py", KERAS_IN_A_SESSION):
        assert "rates [0.1, 0.1, 0.05] 1.5 1" in told, told
