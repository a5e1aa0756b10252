"""Images with labels, as ``tf.data`` pipelines."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

CROP = 8
"""An augmented image is moved by up to an eighth of its size in either direction."""


@dataclass(frozen=True)
class Images:
    """Images for training and for testing.

    Attributes:
        train, test: pairs of images, uint8 (n, height, width, 1), and labels, int32 (n,).
        may_flip: whether a mirrored image still belongs to its class: clothes do, digits do not.
    """

    train: tuple[Any, Any]
    test: tuple[Any, Any]
    may_flip: bool

    @property
    def train_count(self) -> int:
        return len(self.train[1])

    @property
    def test_count(self) -> int:
        return len(self.test[1])

    @property
    def shape(self) -> tuple[int, int, int]:
        height, width, channels = self.train[0].shape[1:]
        return height, width, channels

    @property
    def classes(self) -> int:
        return int(max(self.train[1].max(), self.test[1].max())) + 1

    def training(self, batch_size: int, rank: int = 0, ranks: int = 1) -> tf.data.Dataset:
        """Batches of augmented images without end, shuffled in every epoch: every ``ranks``-th image, from ``rank`` on."""
        mine = tuple(part[rank::ranks] for part in self.train)
        return _endless(mine, batch_size).map(self._augmented).prefetch(2).with_options(_one_thread())

    def validation(self, batch_size: int) -> tf.data.Dataset:
        """Batches of test images without end, shuffled in every epoch."""
        return _endless(self.test, batch_size).map(_scaled).prefetch(2).with_options(_one_thread())

    def testing(self, batch_size: int) -> tf.data.Dataset:
        """Batches that contain every test image once."""
        batches = tf.data.Dataset.from_tensor_slices(self.test).batch(batch_size)
        return batches.map(_scaled).prefetch(2).with_options(_one_thread())

    def _augmented(self, images: Any, labels: Any) -> Any:
        """Pad each image with black, crop it at a random position, and mirror half of the images."""
        images, labels = _scaled(images, labels)
        count = tf.shape(images)[0]
        height, width, _ = self.shape
        for axis, length in ((1, height), (2, width)):
            margin = max(1, length // CROP)
            padding = [[0, 0]] * 4
            padding[axis] = [margin, margin]
            first = tf.random.uniform([count, 1], 0, 2 * margin + 1, tf.int32)
            padded = tf.pad(images, padding, constant_values=-1.0)
            images = tf.gather(padded, first + tf.range(length), axis=axis, batch_dims=1)
        if self.may_flip:
            mirrored = tf.random.uniform([count, 1, 1, 1]) < 0.5
            images = tf.where(mirrored, tf.reverse(images, [2]), images)
        return images, labels


def steps(images: int, batch_size: int) -> int:
    """The number of whole batches in a number of images.

    Raises:
        SystemExit: there is not even one.
    """
    if images < batch_size:
        sys.exit(f"{images} images are fewer than one batch of {batch_size}; lower --batch-size or --val-batch-size")
    return images // batch_size


def load(file: Path | None, hvd: Any = None, limit: int | None = None) -> Images:
    """The images of ``file``. Without it Fashion-MNIST or, if that cannot be downloaded, 10,000 images of digits.

    Args:
        file: an ``.npz`` file with ``x`` (n, height, width), 0 to 255, and ``y`` (n,), labels from 0: the first four fifths to
            train, the others to test.
        limit: take so many images at most, a fifth of them to test.
        hvd: ``horovod.keras``, initialised. Every rank passes it, or none: it checks that all use the same images.

    Raises:
        SystemExit: the file is not of that kind.
    """
    images = _all_of(file, hvd)
    if limit is None:
        return images
    train, test = limit - limit // 5, limit // 5
    return Images(
        (images.train[0][:train], images.train[1][:train]),
        (images.test[0][:test], images.test[1][:test]),
        images.may_flip,
    )


def _all_of(file: Path | None, hvd: Any) -> Images:
    if file is not None:
        return _split(*_read(file))
    fashion, why_not = _fashion_mnist()
    here = fashion is not None
    everywhere = here if hvd is None else float(hvd.allreduce(float(here), name="Fashion-MNIST is here")) == 1.0
    if everywhere:
        train, test = fashion
        return Images(_uniform(*train), _uniform(*test), may_flip=True)
    if hvd is None or hvd.rank() == 0:
        print(
            f"Fashion-MNIST cannot be downloaded ({why_not or 'by another rank'}): training on generated images of digits"
        )
    return _generated()


def _generated(train: int = 8_000, test: int = 2_000) -> Images:
    """Images of 28 x 28 pixels, the same in every process: the digits of scikit-learn, three times as large and moved.

    Test images and training images are made of different digits.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    random = np.random.default_rng(0)
    large = np.repeat(np.repeat(digits.images * (255 / 16), 3, axis=1), 3, axis=2)
    cut = len(large) * 4 // 5

    def made(count: int, first: int, end: int) -> tuple[Any, Any]:
        chosen = random.integers(first, end, count)
        images = np.zeros((count, 28, 28))
        for image, digit, (row, column) in zip(images, large[chosen], random.integers(0, 5, (count, 2)), strict=True):
            image[row : row + 24, column : column + 24] = digit
        return _uniform(images, digits.target[chosen])

    return Images(made(train, 0, cut), made(test, cut, len(large)), may_flip=False)


def _read(file: Path) -> tuple[Any, Any]:
    try:
        with np.load(file) as arrays:
            return arrays["x"], arrays["y"]
    except (OSError, KeyError, ValueError) as error:
        sys.exit(f"--data {file}: {error}. Give an .npz file with arrays 'x' and 'y'.")


def _fashion_mnist() -> tuple[Any, str]:
    """Fashion-MNIST from Keras's folder, or downloaded; or None, and the reason. The ranks of a host take turns."""
    folder = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras") / "datasets"
    folder.mkdir(parents=True, exist_ok=True)
    before = socket.getdefaulttimeout()
    with (folder / "fashion-mnist.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        socket.setdefaulttimeout(10)  # Keras sets no timeout, and would wait forever
        try:
            return keras.datasets.fashion_mnist.load_data(), ""
        except Exception as error:  # Keras raises no other class if a download fails
            return None, f"{type(error).__name__}: {error}"
        finally:
            socket.setdefaulttimeout(before)


def _split(images: Any, labels: Any) -> Images:
    cut = len(labels) * 4 // 5
    return Images(_uniform(images[:cut], labels[:cut]), _uniform(images[cut:], labels[cut:]), may_flip=False)


def _uniform(images: Any, labels: Any) -> tuple[Any, Any]:
    return np.asarray(images, np.uint8)[..., np.newaxis], np.asarray(labels, np.int32)


def _endless(pair: tuple[Any, Any], batch_size: int) -> tf.data.Dataset:
    order = tf.data.Dataset.from_tensor_slices(pair).shuffle(len(pair[1])).repeat()
    return order.batch(batch_size, drop_remainder=True)


def _scaled(images: Any, labels: Any) -> Any:
    """float32 from -1 to 1."""
    return tf.cast(images, tf.float32) / 127.5 - 1, labels


def _one_thread() -> tf.data.Options:
    """Use one core at most for the pipeline. The others are for the network and for other ranks."""
    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    return options
