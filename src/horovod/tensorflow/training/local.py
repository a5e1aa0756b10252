"""Variables whose gradients are not reduced: those of a part of a model that each rank has for itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.common.local_gradients import reduce_shared
from horovod.core.process_set import ProcessSet
from horovod.tensorflow.training.gradients import Reduction, identity, reduce_gradients


class LocalSources:
    """A set of variables or tensors whose gradients stay on their rank.

    Args:
        process_set: the ranks that reduce the other gradients.
        scale: divide local gradients by the size of ``process_set``. Then a local variable moves as it would for the average
            of its gradient and zeros from all other ranks.
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
        """What is applied for a local gradient."""
        size = self._process_set.size() if self._process_set.included() else 1
        if gradient is None or not self._scale or size == 1:
            return gradient
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(
                gradient.values / tf.cast(size, gradient.dtype), gradient.indices, gradient.dense_shape
            )
        return gradient / tf.cast(size, gradient.dtype)

    def reduce(self, gradients: Sequence[Any], sources: Sequence[Any], reduction: Reduction, name: str) -> list[Any]:
        """Reduce the gradients of sources that are not local. Returns all gradients to apply, in the order of ``sources``."""

        def reduce(shared: list[int]) -> list[Any]:
            return reduce_gradients([gradients[i] for i in shared], [sources[i] for i in shared], reduction, name)

        return reduce_shared(gradients, self.kept(gradients, sources), reduce)

    def kept(self, gradients: Sequence[Any], sources: Sequence[Any]) -> dict[int, Any]:
        """By index, what is applied for the gradients of local sources."""
        pairs = zip(gradients, sources, strict=True)
        return {index: self.scaled(gradient) for index, (gradient, source) in enumerate(pairs) if source in self}
