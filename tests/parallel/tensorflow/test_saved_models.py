"""SavedModels whose functions contain collectives: loaded in the same process, in another one, and where Horovod is missing."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd
from launcher.harness import EAGER
from parallel.tensorflow.conftest import QUIET
from ranks import SOURCE
from time_limits import SOON


class Trainer(tf.Module):  # type: ignore[misc]  # untyped base
    """One function with every operation, one that trains, and one without collectives."""

    def __init__(self, some: Any) -> None:
        super().__init__()
        self.weight = tf.Variable([1.0, 2.0])
        self.some = some

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, 2], tf.float32)])
    def everything(self, x: Any) -> dict[str, Any]:
        return {
            "allreduce": hvd.allreduce(x * self.weight, op=hvd.Sum, prescale_factor=0.5),
            "grouped": hvd.grouped_allreduce([x, 2 * x])[1],
            "sparse": tf.convert_to_tensor(hvd.allreduce(tf.IndexedSlices(x[:1], [0], [1, 2]))),
            "allgather": hvd.allgather(x),
            "broadcast": hvd.broadcast(x, 0),
            "alltoall": hvd.alltoall(x),
            "reducescatter": hvd.reducescatter(x),
            "some": hvd.allreduce(x, op=hvd.Max, process_set=self.some),
            "size": hvd.size_op(),
            "rank": hvd.rank_op(),
        }

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, 2], tf.float32)])
    def train(self, x: Any) -> Any:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(x * self.weight**2)
        self.weight.assign_sub(tape.gradient(loss, [self.weight])[0])
        return self.weight.read_value()

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, 2], tf.float32)])
    def serve(self, x: Any) -> Any:
        return x * self.weight


def agree(found: Any, expected: Any) -> None:
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_functions_with_collectives_can_be_saved_and_run_where_they_are_loaded(job: Any, tmp_path: Path) -> None:
    def check() -> None:
        first, last = hvd.add_process_set([0, 1]), hvd.add_process_set([2])
        me = hvd.rank()
        trainer = Trainer(last if me == 2 else first)
        x = tf.ones([3, 2]) * (me + 1.0)
        expected = (
            None if me == 1 else trainer.everything(x)
        )  # a function that was traced can be saved, and one that was not
        tf.saved_model.save(trainer, str(tmp_path / str(me)))
        expected = expected or trainer.everything(x)
        hvd.remove_process_set(first)
        hvd.remove_process_set(last)
        for ranks in ([2], [0, 2], [0, 1]):  # the same sets have other numbers now
            hvd.add_process_set(ranks)
        loaded = tf.saved_model.load(str(tmp_path / str([1, 0, 2][me])))  # that of another process
        agree(loaded.everything(x), expected)
        agree(trainer.everything(x), expected)
        watched = tf.Variable(x)
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(loaded.everything(watched)["allreduce"] ** 2)
        np.testing.assert_array_equal(tape.gradient(value, watched), [[9.0, 36.0]] * 3)
        np.testing.assert_array_equal(loaded.train(x), trainer.train(x))

    job(3, check, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
    program = f"""
import sys, numpy as np, tensorflow as tf
loaded = tf.saved_model.load({str(tmp_path / "0")!r})
x = tf.ones([2, 2])
assert loaded.serve(x).numpy().tolist() == [[1.0, 2.0]] * 2  # needs no Horovod
try:
    loaded.train(x)
    raise SystemExit("it ran")
except tf.errors.OpError as error:
    assert "HorovodSubmit" in str(error), error
import horovod.tensorflow as hvd
hvd.init()
assert loaded.train(x).numpy().tolist() == [-3.0, -6.0]  # in a job of one rank
"""
    environment = {**os.environ, **QUIET, "PYTHONPATH": os.pathsep.join([str(SOURCE), EAGER])}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=SOON
    )
    assert done.returncode == 0, done.stderr


def test_a_loaded_copy_outlives_the_function_that_was_saved_and_its_queue(job: Any, tmp_path: Path) -> None:
    def check() -> None:
        from horovod.tensorflow.graph import operation

        class Sharer(tf.Module):  # type: ignore[misc]  # untyped base
            @tf.function(autograph=False, input_signature=[])
            def share(self) -> Any:  # an operation with a gradient is never freed, as TensorFlow keeps its gradient
                return hvd.broadcast_([self.value], 1)[0]

        def make() -> Any:
            sharer = Sharer()
            sharer.value = tf.Variable(hvd.rank())
            return sharer

        before = set(operation._queues)
        sharer = make()
        folder = str(tmp_path / str(hvd.rank()))
        assert sharer.share() == 1
        sharer.value.assign(10 * hvd.rank())
        tf.saved_model.save(sharer, folder)
        loaded = tf.saved_model.load(folder)
        assert loaded.share() == 10
        made = set(operation._queues) - before
        assert made
        del sharer
        gc.collect()
        assert not made & set(operation._queues)  # destroyed with its graph
        assert not made & set(operation._in_flight)
        for value in (3, 4):
            loaded.value.assign(value * hvd.rank())
            assert loaded.share() == value

    job(2, check)
