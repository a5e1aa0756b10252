"""``SyncBatchNormalization``: batch normalisation with the mean and variance of the batches of all ranks together.

Forward gathers one row from each rank: its means, its sums of squared deviations, and the number of elements. These give the
statistics of the concatenated batch. Backward adds up the gradients of both statistics over the ranks. Deviations from a rank's
own mean are exact even if the mean is much larger than the deviation; sums of squares are not.

Sources: Ioffe and Szegedy, "Batch Normalization", 2015 (arXiv:1502.03167); Chan, Golub and LeVeque, "Updating formulae and a
pairwise algorithm for computing sample variances", 1979, for combining the statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod._bindings.reductions import ReductionArguments, Sum
from horovod.common.basics import size
from horovod.core.lifecycle.process_set import global_process_set
from horovod.tensorflow.graph.decorators import unconverted, with_gradient
from horovod.tensorflow.graph.names import collective_name
from horovod.tensorflow.graph.run import run
from horovod.tensorflow.ops.allgather import allgather_submission
from horovod.tensorflow.ops.dense_allreduce import allreduce_submission
from horovod.tensorflow.tensors import dimensions

_KERAS_2 = hasattr(tf.keras.layers.BatchNormalization, "_fused_can_be_used")
_GATHER = "HorovodAllgather"
_REDUCE = "HorovodAllreduce"


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc]  # untyped base
    """Use in place of ``tf.keras.layers.BatchNormalization``. Every rank must have the same layers.

    In training, forward and backward are collectives: all ranks must call them in the same order. Batches may have any size,
    including 0. Outputs, gradients of inputs and moving statistics are those of one process with the concatenated batch.
    Gradients of gamma and beta are this rank's part, which the tape or optimizer reduces like all other gradients. In
    inference, and in a job of one rank, it is ordinary batch normalisation.

    Args:
        fused: must be False, because there is no fused computation across ranks.
        kwargs: arguments of ``tf.keras.layers.BatchNormalization``.

    Raises:
        ValueError: ``fused`` is True or None.
    """

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        if _KERAS_2:
            kwargs["fused"] = False  # by default, Keras 2 normalises images with a fused operation, without _moments
        super().__init__(**kwargs)

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        """Normalise. In a graph of TensorFlow 1, the operations in UPDATE_OPS update the moving statistics."""
        outputs = super().call(inputs, training=training, mask=mask)
        if not tf.executing_eagerly() and not tf.inside_function():
            known = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.UPDATE_OPS)
            for update in self.updates:
                if not any(update is each for each in known):
                    tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.UPDATE_OPS, update)
        return outputs

    @unconverted
    def _moments(self, inputs: Any, *given: Any, **options: Any) -> tuple[Any, Any]:
        """The mean and the biased variance of all ranks' inputs, of shape (channels,). Keras 2 and 3 differ in ``given``."""
        if size() == 1:
            moments: tuple[Any, Any] = super()._moments(inputs, *given, **options)
            return moments
        axes, keep, mask = (
            _arguments_of_keras_2(*given, **options) if _KERAS_2 else (self._reduction_axes, False, *given)
        )
        weights = None if mask is None else tf.expand_dims(tf.cast(mask, inputs.dtype), -1)
        return _moments_of_all(inputs, weights, axes, keep)


def _arguments_of_keras_2(reduction_axes: Any, keep_dims: bool, mask: Any = None) -> tuple[Any, bool, Any]:
    return reduction_axes, keep_dims, mask


def _moments_of_all(inputs: Any, weights: Any, axes: Sequence[int], keep: bool) -> tuple[Any, Any]:
    """The mean and the biased variance over ``axes`` of the inputs of all ranks. Every rank must call it.

    Args:
        weights: 0 for elements to ignore and 1 for others, broadcast against ``inputs``. None: no element is ignored.
        axes: all axes but that of the channels.
        keep: whether the results keep these axes, with length 1.
    """

    def total(values: Any) -> Any:
        return tf.cast(tf.reduce_sum(values if weights is None else values * weights, axes, keepdims=True), tf.float64)

    @with_gradient
    def moments(inputs: Any) -> Any:
        count = total(tf.ones_like(inputs))
        mean = tf.math.divide_no_nan(total(inputs), count)
        centred = inputs - tf.cast(mean, inputs.dtype)
        correction = tf.math.divide_no_nan(total(centred), count)  # the rounding error of the mean
        deviations = total(tf.square(centred)) - count * tf.square(correction)
        row = tf.stack([mean + correction, deviations, count])
        means, squares, counts = tf.unstack(_gather(row), axis=1)
        total_count = tf.reduce_sum(counts, 0)
        mean_of_all = tf.math.divide_no_nan(tf.reduce_sum(means * counts, 0), total_count)
        spread = squares + counts * tf.square(means - mean_of_all)
        variance_of_all = tf.math.divide_no_nan(tf.reduce_sum(spread, 0), total_count)

        def gradient(for_mean: Any, for_variance: Any) -> Any:
            given = tf.stack(
                [tf.reshape(for_mean, tf.shape(total_count)), tf.reshape(for_variance, tf.shape(total_count))]
            )
            sums = tf.math.divide_no_nan(_add_up(tf.cast(given, tf.float64)), total_count)
            from_mean = inputs - tf.cast(mean_of_all, inputs.dtype)
            result = tf.cast(sums[0], inputs.dtype) + 2 * from_mean * tf.cast(sums[1], inputs.dtype)
            return result if weights is None else result * weights

        found = [tf.cast(each, inputs.dtype) for each in (mean_of_all, variance_of_all)]
        return [each if keep else tf.squeeze(each, axes) for each in found], gradient

    mean, variance = moments(inputs)
    return mean, variance


def _gather(row: Any) -> Any:
    """The rows of all ranks, in rank order."""
    row = tf.expand_dims(row, 0)
    # Keras numbers layers and models per process, and scopes contain these numbers.
    names = collective_name(_GATHER, "sync_batch_norm", [row], ignore_name_scope=True)
    gathered = run(names.node, [allgather_submission(_GATHER, names.negotiated, [row], global_process_set)])[0][0]
    return tf.ensure_shape(gathered, [size(), *(dimensions(row) or [])[1:]])


def _add_up(sums: Any) -> Any:
    names = collective_name(_REDUCE, "sync_batch_norm", [sums], ignore_name_scope=True)
    submission = allreduce_submission(_REDUCE, names.negotiated, [sums], ReductionArguments(Sum))
    return run(names.node, [submission])[0][0]
