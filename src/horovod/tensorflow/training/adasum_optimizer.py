"""``DistributedOptimizer(op=hvd.Adasum)`` for TensorFlow 1: the ranks combine the changes of variables, not the gradients.

On every rank the wrapped optimizer makes its steps with local gradients. After every ``backward_passes_per_step`` steps,
Adasum combines the ranks' changes since the last combination, and each variable becomes its value at that time plus the
combined change. Momentum, Adam's moments and other slots see only local gradients and stay local.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020 (arXiv:2006.02924), section 4.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod._bindings.reductions import Adasum
from horovod.tensorflow.compression import Compressor
from horovod.tensorflow.graph.decorators import unconverted
from horovod.tensorflow.training.gradients import TensorFlowReduction, reduce_gradients


class _DistributedAdasumOptimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]  # untyped base
    """An optimizer of TensorFlow 1 whose ``apply_gradients()`` combines the steps of all ranks.

    Args:
        optimizer: the wrapped optimizer.
        name: the name of this optimizer. None: ``DistributedDelta`` and the class of ``optimizer``.
        use_locking: as for ``tf.compat.v1.train.Optimizer``.
        compression: compresses the changes before they are sent.
        passes: the number of local steps from one combination to the next.
    """

    _START = "delta_start"
    _COUNT = "step_count"

    def __init__(
        self, optimizer: Any, name: str | None, use_locking: bool, compression: type[Compressor], passes: int
    ) -> None:
        super().__init__(name=name or f"DistributedDelta{type(optimizer).__name__}", use_locking=use_locking)
        self._optimizer = optimizer
        self._reduction = TensorFlowReduction(op=Adasum, compression=compression)
        self._passes = passes

    @unconverted
    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped optimizer's gradients, which are those of this rank alone."""
        return self._optimizer.compute_gradients(*args, **kwargs)

    @unconverted
    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """Make a step. After every ``passes`` steps, combine the changes. Every rank must call it, or run its graph."""
        pairs = list(grads_and_vars)
        variables = [variable for gradient, variable in pairs if gradient is not None]
        with tf.init_scope():
            starts = [self._zeros_slot(variable, self._START, self._name) for variable in variables]
            count = self._create_non_slot_variable(0, self._COUNT, min(variables, key=lambda each: each.name))
        gradients = [gradient for gradient, _ in pairs if gradient is not None]
        with tf.control_dependencies(_waitable(gradients)):
            first = tf.equal(_value(count) % self._passes, 0)
        remembered = tf.cond(first, lambda: _assign(starts, [_value(each) for each in variables]), _nothing)
        with tf.control_dependencies(_waitable([remembered])):
            stepped = self._optimizer.apply_gradients(pairs, global_step=global_step)
        with tf.control_dependencies(_waitable([stepped])):
            counted = count.assign_add(1)
        with tf.control_dependencies(_waitable([counted])):
            last = tf.equal(_value(count) % self._passes, 0)
        combined = tf.cond(last, lambda: self._combine(variables, starts), _nothing)
        return combined if tf.executing_eagerly() else tf.group(combined, name=name)

    def _combine(self, variables: Sequence[Any], starts: Sequence[Any]) -> Any:
        before = [_value(start) for start in starts]
        deltas = [_value(variable) - start for variable, start in zip(variables, before, strict=True)]
        combined = reduce_gradients(deltas, variables, self._reduction, self._name)
        return _assign(variables, [start + delta for start, delta in zip(before, combined, strict=True)])

    def get_slot(self, var: Any, name: str) -> Any:
        """A slot of the wrapped optimizer, or ``delta_start``: the variable's value after the last combination."""
        return super().get_slot(var, name) if name == self._START else self._optimizer.get_slot(var, name)

    def get_slot_names(self) -> Any:
        """The wrapped optimizer's slots, and ``delta_start``."""
        return sorted([*self._optimizer.get_slot_names(), *super().get_slot_names()])

    def variables(self) -> Any:
        """The wrapped optimizer's variables, and those of this optimizer."""
        return [*self._optimizer.variables(), *super().variables()]


def _value(variable: Any) -> Any:
    return variable.read_value()


def _waitable(found: Sequence[Any]) -> list[Any]:
    return [] if tf.executing_eagerly() else [each for each in found if each is not None]


def _nothing() -> Any:
    return tf.constant(False)


def _assign(variables: Sequence[Any], values: Sequence[Any]) -> Any:
    """Assign ``values`` to ``variables``. Returns a tensor that is ready once this is done."""
    done = [variable.assign(value) for variable, value in zip(variables, values, strict=True)]
    with tf.control_dependencies(_waitable(done)):
        return tf.constant(True)
