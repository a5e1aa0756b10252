"""Elastic training with TensorFlow in a loop of one's own, eager and in a function, and with a session of TensorFlow 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ranks import RankPool
from scripted_launcher import ScriptedLauncher

POOL = 3
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize("graph", [True, False])
def test_survivors_of_a_lost_rank_go_on(ranks: Callable[..., RankPool], graph: bool) -> None:
    """Rank 0 leaves in step 4; the others make that step again, without it, with the function that they have traced."""

    def work(graph: bool) -> Any:
        import tensorflow as tf

        import horovod.tensorflow as hvd

        with ScriptedLauncher([[0, 1, 2], [1, 2]], hvd.shutdown) as launcher:
            hvd.init()
            model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1, kernel_initializer="ones")])
            optimizer = tf.keras.optimizers.SGD(0.5, momentum=0.5)
            state = hvd.elastic.TensorFlowKerasState(model, optimizer, step=0)
            began = []

            def step(x: Any) -> None:
                with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                    loss = tf.reduce_sum(model(x))
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

            step_function = tf.function(step) if graph else step

            @hvd.elastic.run
            def train(state: Any) -> list[float]:
                began.append((hvd.size(), state.step))
                while state.step < 6:
                    if launcher.process == 0 and state.step == 4:
                        raise SystemExit
                    step_function(tf.ones((1, 2)) * (launcher.process + 1.0))
                    state.step += 1
                    state.commit()
                return [float(each) for each in np.ravel(model.get_weights()[0])]

            try:
                return train(state), began
            except SystemExit:
                return None, began

    (_, *results) = ranks(POOL, QUIET, "tensorflow").run(work, graph)
    weight, velocity = 1.0, 0.0
    for gradient in (2.0,) * 4 + (2.5,) * 2:
        velocity = 0.5 * velocity - 0.5 * gradient
        weight += velocity
    for weights, began in results:
        assert began == [(3, 0), (2, 4)]
        assert weights == pytest.approx([weight] * 2, rel=1e-5)


def test_an_error_of_the_script_in_a_graph_is_not_taken_for_a_failed_collective(job: Any) -> None:
    def check() -> None:
        import tensorflow as tf

        import horovod.tensorflow as hvd

        @tf.function
        def broken() -> Any:
            return tf.numpy_function(lambda: 1 / 0, [], tf.float64)

        calls = []

        @hvd.elastic.run
        def train(state: Any) -> None:
            calls.append(1)
            broken()

        with pytest.raises(tf.errors.UnknownError, match="ZeroDivisionError"):
            train(hvd.elastic.TensorFlowState([tf.Variable(1.0)]))
        assert calls == [1]

    job(2, check)


def test_a_mismatch_in_a_graph_is_a_failed_collective(job: Any) -> None:
    def check() -> str:
        import tensorflow as tf

        import horovod.common.exceptions
        import horovod.tensorflow as hvd

        @tf.function
        def differ() -> Any:
            return hvd.allreduce(tf.ones(hvd.rank() + 1), name="of.different.shapes")

        @hvd.elastic.run
        def train(state: Any) -> None:
            differ()

        with pytest.raises(horovod.common.exceptions.HorovodInternalError) as caught:
            train(hvd.elastic.TensorFlowState([tf.Variable(1.0)]))
        cause = caught.value.__cause__
        assert isinstance(cause, horovod.common.exceptions.MismatchError) and cause.ranks == (0, 1)
        return str(caught.value)

    for text in job(2, check):
        assert "of.different.shapes" in text and "not started by an elastic launcher" in text
        assert "Traceback" not in text


def test_variables_are_those_of_rank_0_from_the_start_and_those_of_a_commit_after_restoring(job: Any) -> None:
    def check() -> None:
        import tensorflow as tf

        import horovod.tensorflow as hvd

        variables = [tf.Variable([1.0, 2.0 + hvd.rank()]), tf.Variable(hvd.rank(), dtype=tf.int64)]
        state = hvd.elastic.TensorFlowState(variables, batch=hvd.rank() + 1)
        assert variables[0].numpy().tolist() == [1.0, 2.0] and variables[1].numpy() == 0 and state.batch == 1
        variables[1].assign(7)
        state.batch = 3
        state.commit()
        variables[1].assign(8)
        state.batch = 4
        state.restore()
        assert variables[1].numpy() == 7 and state.batch == 3
        if hvd.rank() == 1:
            variables[1].assign(9)
        state.sync()
        assert variables[1].numpy() == 7
        with pytest.raises(ValueError, match="pass variables="):
            hvd.elastic.TensorFlowState()

    job(2, check)


def test_a_session_of_tensorflow_1_begins_as_rank_0_and_restores_a_commit(job: Any) -> None:
    def check() -> None:
        import tensorflow as tf

        import horovod.tensorflow as hvd

        with tf.Graph().as_default():
            variable = tf.compat.v1.get_variable("v", initializer=tf.constant([1.0 + hvd.rank()]))
            increment = tf.compat.v1.assign_add(variable, [10.0])
            with tf.compat.v1.Session() as session:
                session.run(tf.compat.v1.global_variables_initializer())
                state = hvd.elastic.TensorFlowState(session=session, batch=0)
                assert session.run(variable) == [1.0]
                session.run(increment)
                state.commit()
                session.run(increment)
                state.restore()
                assert session.run(variable) == [11.0]

    job(2, check)
