"""A part for each rank in ``fit``, and ``evaluate`` over parts of different sizes, as in one process, on every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jobs import make_job
from keras_ranks import needs_keras, tensorflow_pool
from ranks import RankError

SAMPLES = 10


def labelled() -> tuple[Any, Any, Any]:
    """Inputs, labels of three classes, and weights of samples."""
    dice = np.random.default_rng(5)
    x = dice.normal(size=(SAMPLES, 4)).astype(np.float32)
    return x, dice.integers(0, 3, SAMPLES), dice.uniform(0.1, 2, SAMPLES).astype(np.float32)


def judge(keras: Any) -> Any:
    """A classifier, the same on all ranks, with metrics that are means and metrics that are none."""
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3, activation="softmax")])
    metrics = ["accuracy", keras.metrics.MeanIoU(3, sparse_y_pred=False, name="iou")]
    model.compile(loss="sparse_categorical_crossentropy", metrics=metrics, weighted_metrics=["accuracy"])
    return model


def judges_on(backend: str) -> None:
    """Skip a test that evaluates a judge where Keras cannot."""
    if backend == "torch":
        needs_keras("3.10.0", "MeanIoU fails on PyTorch")


def test_evaluate_is_that_of_one_process(job: Any, backend: str) -> None:
    """Four, three and three samples, in batches of two, with weights; as arrays and as a ``tf.data.Dataset``."""
    judges_on(backend)

    def check() -> Any:
        import keras
        import tensorflow as tf

        import horovod.keras as hvd

        model, wanted = judge(keras), {}
        if hvd.rank() == 0:
            whole, all_weights = labelled()[:2], labelled()[2]
            wanted = model.evaluate(*whole, batch_size=2, sample_weight=all_weights, verbose=0, return_dict=True)
        x, y, weights = hvd.data.shard(labelled(), uneven="keep")
        own = model.evaluate(x, y, batch_size=2, sample_weight=weights, verbose=0, return_dict=True)
        results = [hvd.data.evaluate(model, x, y, batch_size=2, sample_weight=weights)]
        results.append(model.get_metrics_result())
        batches = hvd.data.shard(tf.data.Dataset.from_tensor_slices(labelled()), 2, uneven="keep")
        results.append(hvd.data.evaluate(model, batches))
        return wanted, own, len(x), [{name: float(value) for name, value in each.items()} for each in results]

    told = job(3, check)
    assert [count for _, _, count, _ in told] == [4, 3, 3]
    wanted = told[0][0]
    assert len(wanted) == 4 and "iou" in wanted
    for _, own, _, results in told:
        for result in results:
            assert result == pytest.approx(wanted, rel=1e-5)
        assert results == told[0][3], "the same on every rank"
        assert own["loss"] != pytest.approx(wanted["loss"], rel=1e-3)
    means = {name: np.mean([own[name] for _, own, _, _ in told]) for name in wanted}
    assert means != pytest.approx(wanted, rel=1e-3), "no average of averages"


def test_metrics_that_are_ratios_of_sums_are_those_of_one_process(job: Any) -> None:
    def check() -> Any:
        import keras

        import horovod.keras as hvd

        keras.utils.set_random_seed(2)
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1, activation="sigmoid")])
        of = keras.metrics
        metrics = [of.AUC(), of.Precision(), of.R2Score(), of.RootMeanSquaredError(), of.F1Score(threshold=0.5)]
        model.compile(loss="binary_crossentropy", metrics=metrics)
        x, y = labelled()[0], (labelled()[1][:, None] > 0).astype(np.float32)
        whole = model.evaluate(x, y, verbose=0, return_dict=True) if hvd.rank() == 0 else {}
        mine = hvd.data.shard({"x": x, "y": y}, uneven="keep")
        return {name: np.array(value) for name, value in whole.items()}, hvd.data.evaluate(model, **mine)

    told = job(3, check)
    wanted = told[0][0]
    for _, found in told:
        assert set(found) == set(wanted) and len(found) == 6
        for name, value in wanted.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_fit_on_a_data_set_that_does_not_divide_trains_alike_on_all_ranks(job: Any) -> None:
    def check() -> Any:
        import keras
        import tensorflow as tf

        import horovod.keras as hvd

        model = judge(keras)
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "sparse_categorical_crossentropy")
        mine = hvd.data.shard(tf.data.Dataset.from_tensor_slices(labelled()[:2]), 2, shuffle=True)
        history = model.fit(mine, epochs=2, verbose=0, callbacks=[hvd.callbacks.MetricAverageCallback()])
        return history.params["steps"], history.history, [each.tolist() for each in model.get_weights()]

    results = job(3, check)
    assert results[0] == results[1] == results[2] and results[0][0] in (2, None)
    assert len(results[0][1]["loss"]) == 2


def test_arrays_are_divided_into_shards_of_equal_length(job: Any) -> None:
    def check() -> Any:
        import keras

        import horovod.keras as hvd

        model = judge(keras)
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "sparse_categorical_crossentropy")
        x, y = hvd.data.shard(labelled()[:2], uneven="repeat")
        model.fit(x, y, batch_size=3, epochs=2, verbose=0, shuffle=False)
        return len(x), [each.tolist() for each in model.get_weights()]

    results = job(3, check)
    assert results[0] == results[1] == results[2] and results[0][0] == 4


def test_ranks_with_other_metrics_are_told_which(job: Any, backend: str) -> None:
    judges_on(backend)

    def check() -> None:
        import keras

        import horovod.keras as hvd

        model = judge(keras)
        if hvd.rank() == 1:
            model.compile(loss="sparse_categorical_crossentropy", metrics=["accuracy"])
        hvd.data.evaluate(model, *labelled()[:2])

    with pytest.raises(RankError) as caught:
        job(2, check)
    for rank in (0, 1):
        text = str(caught.value.errors[rank])
        assert "test_data.py" in text and "where the metrics are accuracy, iou, loss" in text, text
        assert "where the metrics are accuracy, loss" in text, text


def test_numbers_that_no_metric_keeps_cannot_be_combined(job: Any) -> None:
    def check() -> str:
        import keras

        import horovod.keras as hvd

        class Own(keras.Model):
            def evaluate(self, *args: Any, **options: Any) -> Any:
                return {**super().evaluate(*args, **options), "mood": 1.0}

        inputs = keras.Input((4,))
        model = Own(inputs, keras.layers.Dense(3)(inputs))
        model.compile(loss="mse")
        with pytest.raises(ValueError, match="mood: test_step returns numbers that no metric of the model keeps"):
            hvd.data.evaluate(model, labelled()[0], np.ones((SAMPLES, 3)))
        return "told"

    assert job(2, check) == ["told"] * 2


def test_keras_2_keeps_sums_as_well(ranks: Any) -> None:
    def check() -> Any:
        import tensorflow as tf

        import horovod.tensorflow.keras as hvd

        assert not hasattr(tf.keras, "ops"), "Keras 2"
        tf.keras.utils.set_random_seed(2)
        model = tf.keras.Sequential([tf.keras.layers.Dense(3, activation="softmax")])
        model.compile(loss="sparse_categorical_crossentropy", metrics=["accuracy"])
        wanted = model.evaluate(*labelled()[:2], verbose=0, return_dict=True)
        batches = hvd.data.shard(tf.data.Dataset.from_tensor_slices(labelled()[:2]), 3, uneven="keep")
        return wanted, hvd.data.evaluate(model, batches)

    job = make_job(lambda size: tensorflow_pool(ranks, 2), "horovod.tensorflow.keras")
    for wanted, found in job(3, check):
        assert found == pytest.approx(wanted, rel=1e-5) and set(found) == {"loss", "accuracy"}
