"""Adds up gradients over several backward passes on each rank before they are reduced.

This works in graphs of TensorFlow 1 and 2 and eagerly. The sums and the count of passes are variables. They belong to a
generation: its first pass sets them to zero, because a process that has just arrived has added up nothing, and all ranks must
reduce in the same pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from horovod._bindings.local_gradients import reduce_shared
from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.tensorflow.graph.decorators import unconverted
from horovod.tensorflow.ops.topology import generation_op
from horovod.tensorflow.training.local_sources import LocalSources

AllreduceFunction = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]
"""Takes gradients and their variables, and returns the reduced gradients."""


class LocalGradientAggregationHelper:
    """Adds up gradients, and reduces the sums after every ``backward_passes_per_step`` passes.

    Args:
        backward_passes_per_step: the number of passes.
        allreduce_func: the function that reduces the sums.
        sparse_as_dense: make ``tf.IndexedSlices`` dense. Otherwise they are an error.
        average_aggregated_gradients: divide the sums by ``backward_passes_per_step``.
        rank: part of the variables' names.
        optimizer_type: accepted for compatibility.
        process_set, scale_local_gradients: as for :class:`horovod.tensorflow.training.local_sources.LocalSources`.
        name: part of the variables' names.

    Attributes:
        absent_too: whether ``allreduce_func`` gets variables without a gradient, with None. Otherwise it does not get them.

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
        self.absent_too = False
        self.counter: Any = None
        self._generation: Any = None  # a variable: the generation to which the sums and the counter belong
        self._allreduce = allreduce_func
        self._scope = f"aggregation_variables_{name}{rank}"
        self._local = LocalSources(process_set, scale_local_gradients)
        self._sums: dict[int, Any] = {}  # by the position of the variable
        # The positions that have had a gradient since the last reduction; in graphs, ever.
        self._added: set[int] = set()

    def register_local_var(self, var: Any) -> None:
        """Do not reduce the gradients of a variable. They are still added up over the passes."""
        self._local.add(var)

    def register_local_layers(self, layers: Sequence[Any]) -> None:
        """Do not reduce the gradients of these layers' trainable weights, also of weights that a layer makes later."""
        self._local.add_layers(layers)

    @unconverted
    def compute_gradients(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        """Add ``grads`` to the sums.

        Returns:
            After the last pass the reduced sums, and before it the sums so far, in the order of ``vars``. The sum of a variable
            is None if none of these passes (in a graph: no pass) has had a gradient for it.

        Raises:
            ValueError: ``grads`` contains ``tf.IndexedSlices``, and ``sparse_as_dense`` is False.
        """
        dense = [self._dense(gradient) for gradient in grads]
        present = {index: gradient for index, gradient in enumerate(dense) if gradient is not None}
        self._make_variables(present)
        with tf.control_dependencies(_operations([self._enter_generation()])):
            added = [self._sums[index].assign_add(gradient, read_value=False) for index, gradient in present.items()]
            added.append(self.counter.assign_add(1, read_value=False))
        self._added.update(present)
        variables, known = list(vars), sorted(self._added)
        with tf.control_dependencies(_operations(added)):
            due = tf.equal(self.counter.read_value(), self.backward_passes_per_step)
            if tf.executing_eagerly():
                return self._reduced(variables) if due else self._so_far(variables)

            def of_known(results: Sequence[Any]) -> list[Any]:
                return [results[index] for index in known]

            found = tf.cond(due, lambda: of_known(self._reduced(variables)), lambda: of_known(self._so_far(variables)))
        results: list[Any] = [None] * len(dense)
        for index, gradient in zip(known, tf.nest.flatten(found), strict=True):
            results[index] = gradient
        return results

    def _enter_generation(self) -> Any:
        """Start again in the first pass of a generation. Returns a tensor that is ready once this is done."""
        generation = generation_op()

        def begin() -> Any:
            with tf.control_dependencies(_operations(self._zeroed())):
                entered = self._generation.assign(generation, read_value=False)
            with tf.control_dependencies(_operations([entered])):
                return tf.constant(True)

        return tf.cond(tf.equal(self._generation.read_value(), generation), lambda: tf.constant(False), begin)

    def _zeroed(self) -> list[Any]:
        """Set the sums and the counter to zero."""
        if tf.executing_eagerly():
            self._added.clear()
        zeroed = [each.assign(tf.zeros_like(each), read_value=False) for each in self._sums.values()]
        return [*zeroed, self.counter.assign(0, read_value=False)]

    def _so_far(self, variables: Sequence[Any]) -> list[Any]:
        """The sums in the order of ``variables``. None where no pass has had a gradient."""
        return [self._sums[index].read_value() if index in self._added else None for index in range(len(variables))]

    @unconverted
    def apply_gradients(self, apply_grads_closure: Callable[[], Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the closure if the last :meth:`compute_gradients` has reduced the gradients. Otherwise only count the step.

        It counts the step in ``optimizer.iterations``, if there is such a variable, and in the keyword ``global_step``.

        Args:
            apply_grads_closure: applies the reduced gradients.
            optimizer: the optimizer that the closure calls.
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

    def _make_variables(self, gradients: Mapping[int, Any]) -> None:
        new = {index: gradient for index, gradient in gradients.items() if index not in self._sums}
        if self.counter is not None and not new:
            return
        local = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
        with tf.init_scope(), tf.name_scope(self._scope):
            if self.counter is None:
                self.counter, self._generation = (
                    tf.compat.v1.Variable(
                        value, dtype=tf.int32, trainable=False, name=name, collections=local, use_resource=True
                    )
                    for name, value in (("aggregation_counter", 0), ("aggregation_generation", -1))
                )
            for index, gradient in new.items():
                self._sums[index] = tf.compat.v1.Variable(
                    tf.zeros(gradient.shape, gradient.dtype),
                    trainable=False,
                    name=f"sum_{index}",
                    collections=local,
                    use_resource=True,
                )

    def _reduced(self, variables: Sequence[Any]) -> list[Any]:
        """Reduce the sums of variables that are not local, and set all sums to zero. Returns the reduced and the local sums."""
        divisor = self.backward_passes_per_step if self.average_aggregated_gradients else 1
        sums = [None if each is None else each / tf.cast(divisor, each.dtype) for each in self._so_far(variables)]
        kept = self._local.kept(sums, variables)
        if not self.absent_too:
            kept.update({index: None for index, each in enumerate(sums) if each is None})
        results = reduce_shared(
            sums,
            kept,
            lambda shared: self._allreduce([sums[i] for i in shared], [variables[i] for i in shared]),
        )
        with tf.control_dependencies(
            None if tf.executing_eagerly() else [each for each in results if each is not None]
        ):
            anew = self._zeroed()
        with tf.control_dependencies(_operations(anew)):
            return [None if each is None else tf.identity(each) for each in results]


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
    """``found`` as control dependencies, without None. Empty in eager execution, where every operation is already done."""
    return [] if tf.executing_eagerly() else [each for each in found if each is not None]
