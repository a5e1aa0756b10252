"""Adds up gradients over several backward passes on each rank before they are reduced.

This works in graphs of TensorFlow 1 and 2 and eagerly. The sums and the count of passes are variables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod.common.local_gradients import reduce_shared
from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.tensorflow.graph.decorators import unconverted
from horovod.tensorflow.training.local import LocalSources

AllreduceFunction = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]
"""Takes gradients and their variables, and returns the reduced gradients."""


class LocalGradientAggregationHelper:
    """Adds up gradients, and reduces the sums after every ``backward_passes_per_step`` passes.

    Args:
        backward_passes_per_step: the number of passes.
        allreduce_func: reduces the sums.
        sparse_as_dense: make ``tf.IndexedSlices`` dense.
        average_aggregated_gradients: divide the sums by ``backward_passes_per_step``.
        rank: part of the variables' names.
        optimizer_type: accepted for compatibility.
        process_set, scale_local_gradients: as of :class:`horovod.tensorflow.training.local.LocalSources`.
        name: part of the variables' names.

    Raises:
        ValueError: ``backward_passes_per_step`` is not positive.
    """

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: AllreduceFunction,
        sparse_as_dense: bool = False,
        average_aggregated_gradients: bool = False,
        rank: int = 0,
        optimizer_type: Any = None,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        name: str = "",
    ) -> None:
        if backward_passes_per_step <= 0:
            raise ValueError("backward_passes_per_step must be > 0")
        self.backward_passes_per_step = backward_passes_per_step
        self.sparse_as_dense = sparse_as_dense
        self.average_aggregated_gradients = average_aggregated_gradients
        self.counter: Any = None
        self._allreduce = allreduce_func
        self._scope = f"aggregation_variables_{name}{rank}"
        self._local = LocalSources(process_set, scale_local_gradients)
        self._sums: list[Any] = []

    def register_local_var(self, var: Any) -> None:
        """Do not reduce the gradients of a variable. They are still added up over the passes."""
        self._local.add(var)

    def register_local_layers(self, layers: Sequence[Any]) -> None:
        """Do not reduce the gradients of these layers' trainable weights, also of weights that a layer makes later."""
        self._local.add_layers(layers)

    @unconverted
    def compute_gradients(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        """Add ``grads`` to the sums. Returns the reduced sums after the last pass, and the sums so far before. None stays None.

        Raises:
            ValueError: ``tf.IndexedSlices`` among them, without ``sparse_as_dense``.
        """
        dense = [self._dense(gradient) for gradient in grads]
        present = [index for index, gradient in enumerate(dense) if gradient is not None]
        self._make_variables([dense[index] for index in present])
        added = [
            total.assign_add(dense[index], read_value=False) for total, index in zip(self._sums, present, strict=True)
        ]
        added.append(self.counter.assign_add(1, read_value=False))
        variables = [vars[index] for index in present]
        with tf.control_dependencies(_operations(added)):
            due = tf.equal(self.counter.read_value(), self.backward_passes_per_step)
            found = tf.cond(due, lambda: self._reduced(variables), lambda: [each.read_value() for each in self._sums])
        results: list[Any] = [None] * len(dense)
        for index, gradient in zip(present, tf.nest.flatten(found), strict=True):
            results[index] = gradient
        return results

    @unconverted
    def apply_gradients(self, apply_grads_closure: Callable[[], Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the closure if the last :meth:`compute_gradients` has reduced the gradients. Otherwise only count the step.

        Steps are counted in ``optimizer.iterations``, if there is such a variable, and in the keyword ``global_step``.
        """

        def apply() -> Any:
            with tf.control_dependencies(_operations([apply_grads_closure()])):
                return tf.constant(True)

        def count() -> Any:
            counters = [getattr(optimizer, "iterations", None), kwargs.get("global_step")]
            counted = [each.assign_add(tf.ones([], each.dtype)) for each in counters if each is not None]
            with tf.control_dependencies(_operations(counted)):
                return tf.constant(True)

        done = tf.cond(tf.equal(self.counter.read_value(), 0), apply, count)
        return done if tf.executing_eagerly() else done.op

    def _dense(self, gradient: Any) -> Any:
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        if not self.sparse_as_dense:
            raise ValueError(
                "IndexedSlices are not supported when `backward_passes_per_step` > 1 and `sparse_as_dense` is False."
            )
        return tf.convert_to_tensor(gradient)

    def _make_variables(self, gradients: Sequence[Any]) -> None:
        if self.counter is not None:
            return
        local = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
        with tf.init_scope(), tf.name_scope(self._scope):
            self.counter = tf.compat.v1.Variable(
                0, dtype=tf.int32, trainable=False, name="aggregation_counter", collections=local, use_resource=True
            )
            self._sums = [
                tf.compat.v1.Variable(
                    tf.zeros(gradient.shape, gradient.dtype),
                    trainable=False,
                    name=f"sum_{number}",
                    collections=local,
                    use_resource=True,
                )
                for number, gradient in enumerate(gradients)
            ]

    def _reduced(self, variables: Sequence[Any]) -> list[Any]:
        """Reduce the sums that are not local, and set all sums to zero. Returns the results."""
        divisor = self.backward_passes_per_step if self.average_aggregated_gradients else 1
        sums = [each.read_value() / tf.cast(divisor, each.dtype) for each in self._sums]
        results = reduce_shared(
            sums,
            self._local.kept(sums, variables),
            lambda shared: self._allreduce([sums[i] for i in shared], [variables[i] for i in shared]),
        )
        with tf.control_dependencies(None if tf.executing_eagerly() else results):
            anew = [each.assign(tf.zeros_like(each), read_value=False) for each in self._sums]
            anew.append(self.counter.assign(0, read_value=False))
        with tf.control_dependencies(_operations(anew)):
            return [tf.identity(each) for each in results]


class LocalGradientAggregationHelperEager(LocalGradientAggregationHelper):
    """The same helper, with the arguments that eager code passes."""

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: AllreduceFunction,
        sparse_as_dense: bool = False,
        average_aggregated_gradients: bool = False,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
    ) -> None:
        super().__init__(
            backward_passes_per_step,
            allreduce_func,
            sparse_as_dense,
            average_aggregated_gradients,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        )


def _operations(found: Sequence[Any]) -> list[Any]:
    """The control dependencies among ``found``. In eager execution there are none: every operation is already done."""
    return [] if tf.executing_eagerly() else [each for each in found if each is not None]
