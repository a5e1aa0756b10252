"""Wide residual networks. Source: Zagoruyko & Komodakis 2016, Wide Residual Networks (arXiv:1605.07146), table 1."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers


def wide_resnet(shape: tuple[int, int, int], classes: int, depth: int, width: int, weight_decay: float) -> keras.Model:
    """WRN-depth-width: three groups of ``(depth - 4) / 6`` blocks with 16, 32 and 64 times ``width`` channels.

    Args:
        shape: (height, width, channels) of an image.
        classes: the number of scores; the loss applies the softmax.
        weight_decay: of the kernels, as a penalty: half of it times the sum of their squares.

    Returns:
        A model from (images, height, width, channels) to (images, classes), float32.
    """
    decay = keras.regularizers.L2(weight_decay / 2)
    images = x = keras.Input(shape)
    x = _convolution(16, 1, decay)(x)
    for channels, stride in ((16 * width, 1), (32 * width, 2), (64 * width, 2)):
        for number in range((depth - 4) // 6):
            x = _block(x, channels, stride if number == 0 else 1, decay)
    x = layers.GlobalAveragePooling2D()(_activated(x))
    return keras.Model(images, layers.Dense(classes, kernel_regularizer=decay)(x), name=f"WRN-{depth}-{width}")


def _block(x: Any, channels: int, stride: int, decay: Any) -> Any:
    """Normalise, activate and convolve, twice. Add ``x``, convolved if its number of channels differs."""
    active = _activated(x)
    shortcut = x if x.shape[-1] == channels else _convolution(channels, stride, decay, kernel=1)(active)
    y = _convolution(channels, stride, decay)(active)
    y = _convolution(channels, 1, decay)(_activated(y))
    return layers.Add()([shortcut, y])


def _activated(x: Any) -> Any:
    return layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))


def _convolution(channels: int, stride: int, decay: Any, kernel: int = 3) -> Any:
    return layers.Conv2D(
        channels,
        kernel,
        stride,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
        kernel_regularizer=decay,
    )
