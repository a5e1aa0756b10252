"""``DistributedOptimizer`` for optimizers of TensorFlow 1. For those of Keras see :mod:`horovod.tensorflow.keras`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod._models.arrival import Arrival, ChangeWarning
from horovod.common.basics import rank
from horovod.tensorflow import reduced_marks
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from horovod.tensorflow.graph.decorators import unconverted
from horovod.tensorflow.training.gradients import TensorFlowReduction, reduce_gradients
from horovod.tensorflow.training.local_sources import LocalSources


class _DistributedOptimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]  # untyped base
    """An optimizer of TensorFlow 1 whose ``compute_gradients()`` returns gradients reduced over the ranks.

    Args:
        optimizer: the wrapped optimizer, which does everything else.
        name: the name of this optimizer. None: ``Distributed`` and the class of ``optimizer``.
        use_locking: as for ``tf.compat.v1.train.Optimizer``.
        reduction: how gradients are reduced.
        passes: the number of backward passes whose gradients are added up before they are reduced.
        average_passes: whether the sum is divided by ``passes``.
        scale_local: as for :class:`horovod.tensorflow.training.local_sources.LocalSources`.

    Raises:
        ValueError: ``passes`` is greater than 1 in eager execution.
    """

    def __init__(
        self,
        optimizer: Any,
        name: str | None,
        use_locking: bool,
        reduction: TensorFlowReduction,
        passes: int,
        average_passes: bool,
        scale_local: bool,
    ) -> None:
        name = name or f"Distributed{type(optimizer).__name__}"
        super().__init__(name=name, use_locking=use_locking)
        self._optimizer = optimizer
        self._reduction = reduction
        self._warning = ChangeWarning("apply_gradients() of the distributed optimizer")
        self._made = reduced_marks.next_number()
        reduced_marks.watch_tapes()
        self._local = LocalSources(reduction.process_set, scale_local)
        self._aggregation: LocalGradientAggregationHelper | None = None
        if passes > 1:
            if tf.executing_eagerly():
                raise ValueError(
                    "backward_passes_per_step > 1 is not supported for optimizers of TensorFlow 1 in eager execution; "
                    "use one of tf.keras.optimizers"
                )
            self._aggregation = LocalGradientAggregationHelper(
                passes,
                lambda gradients, variables: reduce_gradients(gradients, variables, reduction, name),
                reduction.sparse_as_dense,
                average_passes,
                rank(),
                process_set=reduction.process_set,
                scale_local_gradients=scale_local,
                name=name,
            )
            self._aggregation.absent_too = True

    def register_local_var(self, var: Any) -> None:
        """Do not reduce the gradients of ``var``."""
        self._local.add(var)
        if self._aggregation is not None:
            self._aggregation.register_local_var(var)

    @unconverted
    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """The wrapped optimizer's gradients, reduced over the ranks. Every rank must call it, or run the graph it is in."""
        computed = self._optimizer.compute_gradients(*args, **kwargs)
        gradients = [gradient for gradient, _ in computed]
        variables = [variable for _, variable in computed]
        return self._reduce(gradients, variables)

    def _reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[tuple[Any, Any]]:
        if self._aggregation is not None:
            reduced = self._aggregation.compute_gradients(gradients, variables)
        else:
            reduced = self._local.reduce(gradients, variables, self._reduction, self._name)
        if self._reduction.active():
            reduced_marks.mark(reduced, variables, self._reduction.process_set)
        return list(zip(reduced, variables, strict=True))

    def _reduced(self, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """The gradients and variables to apply. Reduces them, unless :meth:`compute_gradients` or a tape has done so."""
        members = self._reduction.process_set
        arrivals = [
            (variable, reduced_marks.arrival(gradient, variable, members, self._made))
            for gradient, variable in pairs
            if gradient is not None and variable not in self._local
        ]
        if not self._reduction.active() or all(arrived is Arrival.REDUCED for _, arrived in arrivals):
            return pairs
        self._warning.give([str(variable.name) for variable, arrived in arrivals if arrived is Arrival.CHANGED])
        return self._reduce([gradient for gradient, _ in pairs], [variable for _, variable in pairs])

    @unconverted
    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce the gradients, unless they are reduced already, and apply them.

        If gradients are added up over several passes, it applies them only after the last pass.
        """
        pairs = self._reduced(list(grads_and_vars))
        if self._aggregation is None:
            return self._optimizer.apply_gradients(pairs, *args, **kwargs)
        with tf.control_dependencies([gradient for gradient, _ in pairs if gradient is not None]):
            return self._aggregation.apply_gradients(
                lambda: self._optimizer.apply_gradients(pairs, *args, **kwargs), self._optimizer, *args, **kwargs
            )

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped optimizer's slot."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """The names of the wrapped optimizer's slots."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped optimizer's variables."""
        return self._optimizer.variables(*args, **kwargs)
