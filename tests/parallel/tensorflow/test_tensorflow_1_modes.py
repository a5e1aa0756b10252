"""Scripts that switch TensorFlow 2's behaviour off: tensor shapes are made of ``Dimension`` objects there, not of numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from parallel.tensorflow.conftest import QUIET
from parallel.tensorflow.test_scripts import play, run
from ranks import RankPool

SCRIPT = """
import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1
for switch in SWITCHES:
    getattr(tf1, switch)()
import horovod.tensorflow as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
session = None if tf.executing_eagerly() else tf1.Session()

def values(tensors):
    return tf.nest.map_structure(np.asarray, tensors) if session is None else session.run(tensors)

def mine(*shape):
    return tf.ones(shape) * (rank + 1)

def gradient(function, x):
    if session is not None:
        return tf.gradients(function(x), x)[0]
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    return tape.gradient(y, x)

def slices():
    reduced = hvd.allreduce(tf.IndexedSlices(mine(1, 2), tf.constant([rank]), tf.constant([4, 2])), op=hvd.Sum)
    return [reduced.values, reduced.indices]

def alike(tensors):
    return len({str(each) for each in hvd.allgather_object(values(tensors))}) == 1

total = size * (size + 1) / 2
by_rank = np.arange(1.0, size + 1)
by_row = np.repeat(by_rank, range(1, size + 1))
expected = [
    (hvd.allreduce(mine(2, 3), op=hvd.Sum), np.full((2, 3), total)),
    (hvd.allreduce(mine(2), op=hvd.Sum, compression=hvd.Compression.fp16), np.full(2, total)),
    (hvd.grouped_allreduce([mine(2), mine(1, 2)], op=hvd.Sum), [np.full(2, total), np.full((1, 2), total)]),
    (slices(), [np.stack([by_rank] * 2, 1), np.arange(size)]),
    (hvd.allgather(mine(rank + 1, 2)), np.stack([by_row] * 2, 1)),
    (hvd.grouped_allgather([mine(rank + 1), mine(1, 2)]), [by_row, np.stack([by_rank] * 2, 1)]),
    (hvd.broadcast(mine(4), size - 1), np.full(4, float(size))),
    (hvd.alltoall(mine(2 * size, 1)), np.repeat(by_rank, 2)[:, None]),
    (hvd.alltoall(mine(size, 1), splits=[1] * size), (by_rank[:, None], np.ones(size))),
    (hvd.reducescatter(mine(2 * size, 2), op=hvd.Sum), np.full((2, 2), total)),
    (hvd.grouped_reducescatter([mine(size, 2), mine(size)], op=hvd.Sum), [np.full((1, 2), total), np.full(1, total)]),
    ([hvd.size_op(), hvd.rank_op(), hvd.local_rank_op(), hvd.process_set_included_op()], [size, rank, rank, 1]),
]
for tensors, wanted in expected:
    for one, two in zip(tf.nest.flatten(values(tensors)), tf.nest.flatten(wanted), strict=True):
        np.testing.assert_array_equal(one, two)
        assert np.shape(one) == np.shape(two)

for function in [
    lambda x: hvd.allreduce(x, op=hvd.Sum),
    lambda x: hvd.grouped_allreduce([x, x])[1],
    hvd.allgather,
    lambda x: hvd.grouped_allgather([x, x])[1],
    lambda x: hvd.broadcast(x, 0),
    hvd.alltoall,
    lambda x: hvd.alltoall(x, splits=[1] * size)[0],
    hvd.reducescatter,
    lambda x: hvd.grouped_reducescatter([x, x])[1],
]:
    assert values(gradient(function, mine(2 * size, 2))).shape == (2 * size, 2)

if session is None:
    variables = [tf.Variable(mine(3, 2)), tf.Variable(mine(4, 2))]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variables[0] ** 2) + tf.reduce_sum(tf.nn.embedding_lookup(variables[1], [rank]))
    dense, sparse = hvd.DistributedGradientTape(tape).gradient(loss, variables)
    np.testing.assert_allclose(dense, np.full((3, 2), 2 * by_rank.mean()))
    assert sparse.values.shape.as_list() == [size, 2]
    hvd.broadcast_variables(variables, 1)
    assert alike(variables)
    for variable in variables:
        variable.assign_add(tf.ones_like(variable) * rank)
    hvd.broadcast_(variables, 1)
    assert alike(variables)
else:
    random = tf1.random_normal_initializer(seed=rank)
    weight = tf1.get_variable("weight", [3, 2], initializer=random)
    table = tf1.get_variable("table", [4, 2], initializer=random)
    for passes in (1, 2):
        optimizer = hvd.DistributedOptimizer(
            tf1.train.MomentumOptimizer(0.1, 0.9), backward_passes_per_step=passes, sparse_as_dense=passes > 1
        )
        loss = tf.reduce_sum(weight**2) * (rank + 1) + tf.reduce_sum(tf.nn.embedding_lookup(table, [rank]))
        step = optimizer.minimize(loss, global_step=tf1.train.get_or_create_global_step())
        session.run([tf1.global_variables_initializer(), tf1.local_variables_initializer()])
        session.run(hvd.broadcast_global_variables(0))
        assert alike([weight, table])
        for _ in range(2 * passes):
            session.run(step)
        assert alike([weight, table])
    step = hvd.DistributedOptimizer(tf1.train.GradientDescentOptimizer(0.1), op=hvd.Adasum).minimize(
        tf.reduce_sum(weight**2) * (rank + 1), var_list=[weight]
    )
    session.run(tf1.global_variables_initializer())
    session.run(hvd.broadcast_variables([weight, table], 1, inplace=True))
    session.run(step)
    session.run(hvd.broadcast_([table], 0))
    assert alike([weight, table])
    with tf.Graph().as_default():
        other = tf1.get_variable("other", [3], initializer=random)
        with tf1.train.SingularMonitoredSession(hooks=[hvd.BroadcastGlobalVariablesHook(0)]) as monitored:
            assert len({str(each) for each in hvd.allgather_object(monitored.run(other))}) == 1
assert values(hvd.join()) in range(size)
print("everything works")
"""


def test_a_script_that_switches_tensorflow_2_off_before_the_import_of_horovod(tmp_path: Path) -> None:
    done = run(tmp_path, SCRIPT.replace("SWITCHES", repr(["disable_v2_behavior"])), "-np", "2")
    assert done.returncode == 0 and done.stdout.count("everything works") == 2, done.stdout + done.stderr


@pytest.mark.parametrize(
    "switches", [["disable_v2_tensorshape"], ["disable_v2_tensorshape", "disable_eager_execution"]], ids=" ".join
)
def test_everything_works_with_the_tensor_shapes_of_tensorflow_1(
    ranks: Callable[..., RankPool], tmp_path: Path, switches: list[str]
) -> None:
    script = SCRIPT.replace("SWITCHES", repr(switches))
    for told in play(ranks(2, QUIET, "tensorflow"), tmp_path / "script.py", script):
        assert "everything works" in told, told
