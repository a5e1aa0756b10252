"""The models of ``workloads.py`` in Keras on TensorFlow, of either version: ``tf.keras`` is Keras 2 if
``TF_USE_LEGACY_KERAS=1`` says so, and 3 otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
import workloads as sizes

layers = tf.keras.layers


@dataclass(frozen=True)
class Workload:
    """A model that gives logits, and one batch for it, the same on every rank but for its random numbers."""

    model: Any
    inputs: tf.Tensor
    targets: tf.Tensor

    @property
    def parameters(self) -> int:
        return sum(math.prod(variable.shape) for variable in self.model.trainable_variables)

    @property
    def tensors(self) -> int:
        return len(self.model.trainable_variables)


def convolution(x: Any, outputs: int, width: int, stride: int = 1) -> Any:
    x = layers.Conv2D(outputs, width, stride, padding="same", use_bias=False)(x)
    return layers.BatchNormalization()(x)


def residual_block(x: Any, outputs: int, stride: int) -> Any:
    """Two 3x3 convolutions around which the input passes unchanged, or through a 1x1 convolution where sizes change."""
    shortcut = x
    if stride != 1 or x.shape[-1] != outputs:
        shortcut = convolution(x, outputs, 1, stride)
    x = layers.ReLU()(convolution(x, outputs, 3, stride))
    x = convolution(x, outputs, 3)
    return layers.ReLU()(layers.Add()([x, shortcut]))


def cnn() -> Workload:
    """ResNet-18 for small images: 62 tensors."""
    shape = (sizes.IMAGES, sizes.SIDE, sizes.SIDE, 3)
    images = layers.Input(batch_shape=shape)
    x = layers.ReLU()(convolution(images, sizes.STAGES[0][0], 3))
    for outputs, stride in sizes.STAGES:
        x = residual_block(residual_block(x, outputs, stride), outputs, 1)
    logits = layers.Dense(sizes.CLASSES)(layers.GlobalAveragePooling2D()(x))
    return Workload(tf.keras.Model(images, logits), tf.random.normal(shape), integers(sizes.CLASSES, sizes.IMAGES))


def mlp() -> Workload:
    """Dense layers, all of one width: 14 tensors."""
    shape = (sizes.ROWS, sizes.WIDTH)
    x = rows = layers.Input(batch_shape=shape)
    for _ in range(sizes.LAYERS):
        x = layers.Dense(sizes.WIDTH, activation="relu")(x)
    logits = layers.Dense(sizes.CLASSES)(x)
    return Workload(tf.keras.Model(rows, logits), tf.random.normal(shape), integers(sizes.CLASSES, sizes.ROWS))


def transformer() -> Workload:
    """An encoder that predicts one token for each position: 195 tensors, of which the embedding's gradient is sparse."""
    shape = (sizes.SEQUENCES, sizes.LENGTH)
    width = sizes.EMBEDDING
    tokens = layers.Input(batch_shape=shape, dtype="int32")
    x = layers.Embedding(sizes.VOCABULARY, width)(tokens)
    for _ in range(sizes.BLOCKS):
        attended = layers.MultiHeadAttention(sizes.HEADS, width // sizes.HEADS)(x, x)
        x = layers.LayerNormalization(epsilon=1e-5)(layers.Add()([x, attended]))
        fed = layers.Dense(width)(layers.Dense(4 * width, activation="relu")(x))
        x = layers.LayerNormalization(epsilon=1e-5)(layers.Add()([x, fed]))
    batch = integers(sizes.VOCABULARY, *shape)
    return Workload(tf.keras.Model(tokens, layers.Dense(sizes.VOCABULARY)(x)), batch, batch)


def integers(limit: int, *shape: int) -> tf.Tensor:
    return tf.random.uniform(shape, 0, limit, tf.int32)


WORKLOADS: dict[str, Callable[[], Workload]] = {"cnn": cnn, "mlp": mlp, "transformer": transformer}
