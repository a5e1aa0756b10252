"""Variables whose gradients every rank keeps to itself, as a part of a model that is not shared has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.core.process_set import ProcessSet
from horovod.tensorflow.training.gradients import Reduction, identity, reduce_gradients


class LocalSources:
    """A set of variables or tensors, and what it means for gradients.

    Args:
        process_set: whose size local gradients are divided by.
        scale: whether they are: then a local parameter's step is as long as it would be for an average of one rank's
            gradient and zeros from all others.
    """

    def __init__(self, process_set: ProcessSet, scale: bool) -> None:
        self._process_set = process_set
        self._scale = scale
        self._keys: set[Any] = set()

    def add(self, source: Any) -> None:
        self._keys.add(identity(source))

    def __contains__(self, source: Any) -> bool:
        return identity(source) in self._keys

    def scaled(self, gradient: Any) -> Any:
        """A local gradient as it is used."""
        size = self._process_set.size() if self._process_set.included() else 1
        if gradient is None or not self._scale or size == 1:
            return gradient
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(
                gradient.values / tf.cast(size, gradient.dtype), gradient.indices, gradient.dense_shape
            )
        return gradient / tf.cast(size, gradient.dtype)

    def reduce(self, gradients: Sequence[Any], sources: Sequence[Any], reduction: Reduction, name: str) -> list[Any]:
        """Reduce those that are not local; in the order of ``sources``."""
        results = [
            self.scaled(gradient) if source in self else None
            for gradient, source in zip(gradients, sources, strict=True)
        ]
        shared = [index for index, source in enumerate(sources) if source not in self]
        reduced = reduce_gradients([gradients[i] for i in shared], [sources[i] for i in shared], reduction, name)
        for index, gradient in zip(shared, reduced, strict=True):
            results[index] = gradient
        return results
