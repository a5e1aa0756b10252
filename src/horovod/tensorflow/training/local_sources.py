"""Variables whose gradients are not reduced, because each rank has its own part of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod._bindings.local_gradients import reduce_shared
from horovod._bindings.local_variables import LocalVariables
from horovod.core.lifecycle.process_set import ProcessSet
from horovod.tensorflow.training.gradients import TensorFlowReduction, identity, reduce_gradients
from horovod.tensorflow.training.parameter_guard import of_sources


class LocalSources(LocalVariables):
    """The variables or tensors whose gradients stay on their rank, and how TensorFlow scales these gradients.

    Args:
        process_set, scale: as for :class:`~horovod._bindings.local_variables.LocalVariables`.
    """

    def __init__(self, process_set: ProcessSet, scale: bool) -> None:
        super().__init__(process_set, scale, identity)

    def scaled(self, gradient: Any) -> Any:
        """A local gradient, divided by the number of ranks if it is to be scaled."""
        size = self.divisor()
        if gradient is None or size == 1:
            return gradient
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(
                gradient.values / tf.cast(size, gradient.dtype), gradient.indices, gradient.dense_shape
            )
        return gradient / tf.cast(size, gradient.dtype)

    def reduce(
        self, gradients: Sequence[Any], sources: Sequence[Any], reduction: TensorFlowReduction, name: str
    ) -> list[Any]:
        """Reduce the gradients of sources that are not local. Returns all gradients to apply, in the order of ``sources``."""

        def reduce(shared: list[int]) -> list[Any]:
            own = [sources[i] for i in shared]
            watch = of_sources(own, reduction.process_set)
            return reduce_gradients([gradients[i] for i in shared], own, reduction, name, watch=watch)

        return reduce_shared(gradients, self.kept(gradients, sources), reduce)

    def kept(self, gradients: Sequence[Any], sources: Sequence[Any]) -> dict[int, Any]:
        """The gradients of local sources by their index, scaled."""
        return {index: self.scaled(gradients[index]) for index in self.split(sources)[0]}
