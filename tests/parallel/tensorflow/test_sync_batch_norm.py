"""SyncBatchNormalization: equals one process with all ranks' batches, forward and backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd


def pieces(array: Any, sizes: list[int]) -> list[Any]:
    return np.split(array, np.cumsum(sizes)[:-1])


def step(layer: Any, x: Any, weights: Any, mask: Any = None) -> Any:
    """Output and gradients of a loss that tells all elements apart."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, training=True, mask=mask)
        loss = tf.reduce_sum(tf.cast(y, tf.float32) * tf.cast(y, tf.float32) * weights)
    return y, tape.gradient(loss, [x, *layer.trainable_variables])


@pytest.mark.parametrize("sizes", [[3, 4, 2], [5, 0, 1]])
@pytest.mark.parametrize("shape", [(6,), (3, 2, 4)])
def test_it_equals_one_process_on_the_concatenated_batch(job: Any, sizes: list[int], shape: tuple[int, ...]) -> None:
    def check() -> None:
        random = np.random.default_rng(7)
        data = random.normal(100.0, 2.0, (sum(sizes), *shape)).astype(np.float32)
        weights = random.normal(size=data.shape).astype(np.float32)
        me = hvd.rank()
        for axis in (-1, 1):
            whole = tf.keras.layers.BatchNormalization(axis=axis)
            wanted, (for_x, *for_rest) = step(whole, tf.constant(data), tf.constant(weights))
            for mode in (lambda function: function, tf.function):
                layer = hvd.SyncBatchNormalization(axis=axis)
                layer.build((None, *shape))
                x, w = (tf.constant(pieces(each, sizes)[me]) for each in (data, weights))
                found, (of_x, *of_rest) = mode(lambda x, w, layer=layer: step(layer, x, w))(x, w)
                np.testing.assert_allclose(found, pieces(wanted.numpy(), sizes)[me], atol=2e-4)
                np.testing.assert_allclose(of_x, pieces(for_x.numpy(), sizes)[me], atol=2e-3)
                for one, two in zip(of_rest, for_rest, strict=True):
                    np.testing.assert_allclose(hvd.allreduce(one, op=hvd.Sum), two, rtol=1e-3, atol=1e-3)
                np.testing.assert_allclose(layer.moving_mean, whole.moving_mean, rtol=1e-5)
                np.testing.assert_allclose(layer.moving_variance, whole.moving_variance, rtol=1e-3)
                inference = layer(x, training=False)
                np.testing.assert_allclose(inference, whole(x, training=False), rtol=1e-3, atol=1e-2)

    job(3, check)


def test_masked_and_sixteen_bit_inputs_are_normalised_as_in_one_process(job: Any) -> None:
    def check() -> None:
        random = np.random.default_rng(3)
        data = random.normal(size=(2, 4, 5, 3)).astype(np.float32)
        masks = random.integers(0, 2, size=(2, 4, 5)).astype(bool)
        whole = tf.keras.layers.BatchNormalization()
        merged, mask = data.reshape(8, 5, 3), masks.reshape(8, 5)
        wanted, (for_x, *_) = step(whole, tf.constant(merged), tf.ones_like(merged), tf.constant(mask))
        me = hvd.rank()
        layer = hvd.SyncBatchNormalization()
        found, (of_x, *_) = step(layer, tf.constant(data[me]), tf.ones_like(data[me]), tf.constant(masks[me]))
        np.testing.assert_allclose(found, wanted[4 * me : 4 * me + 4], atol=1e-4)
        np.testing.assert_allclose(of_x, for_x[4 * me : 4 * me + 4], atol=1e-4)
        half = hvd.SyncBatchNormalization(dtype="mixed_float16")
        y = half(tf.constant(data[me], tf.float16), training=True)
        assert y.dtype == tf.float16
        full = tf.keras.layers.BatchNormalization()(tf.constant(merged), training=True)
        np.testing.assert_allclose(y, full[4 * me : 4 * me + 4], atol=1e-2)

    job(2, check)


def test_one_rank_alone_has_an_ordinary_layer_and_fused_layers_are_refused(job: Any) -> None:
    def check() -> None:
        x = tf.constant([[1.0, 2.0], [3.0, 5.0]])
        layer = hvd.SyncBatchNormalization()
        np.testing.assert_array_equal(layer(x, training=True), tf.keras.layers.BatchNormalization()(x, training=True))
        assert layer.name.startswith("sync_batch_normalization")
        for fused in (True, None):
            with pytest.raises(ValueError, match="fused=True"):
                hvd.SyncBatchNormalization(fused=fused)
        again = hvd.SyncBatchNormalization.from_config(layer.get_config())
        assert isinstance(again, hvd.SyncBatchNormalization)

    job(1, check)
