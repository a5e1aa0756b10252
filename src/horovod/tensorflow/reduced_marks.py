"""Marks gradients, so that a distributed optimizer knows their state (:class:`~horovod._models.arrival.Arrival`).

``tf.GradientTape`` marks its results as local, once :func:`watch_tapes` has been called. Reductions mark their results, and
the variables of their results (:func:`mark`). A gradient loses its mark when the script computes with it, for example clips
it, or returns it from a function. Then the mark of the variable still shows that its latest gradient was reduced.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from horovod._models.arrival import Arrival
from horovod.core.lifecycle.process_set import ProcessSet
from horovod.tensorflow.graph.decorators import unconverted

_moments = itertools.count(1)


class _OfVariable(NamedTuple):
    """The mark of a variable whose latest gradient was reduced.

    Attributes:
        moment: when it was reduced, see :func:`next_number`.
        taken: whether an optimizer has applied the gradient. A graph marks only while it is traced, so gradients of its later
            runs may be reduced, too.
    """

    process_set: ProcessSet
    moment: int
    taken: bool = False


def next_number() -> int:
    """A number that is greater than all numbers returned before."""
    return next(_moments)


@functools.cache
def watch_tapes() -> None:
    """Have ``tf.GradientTape`` mark the gradients that it returns, once per process."""
    original = tf.GradientTape.gradient

    @functools.wraps(original)
    @unconverted
    def gradient(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, target, sources, *args, **kwargs)
        for each, source in zip(tf.nest.flatten(found), tf.nest.flatten(sources), strict=True):
            if each is not None:
                each._horovod_local = True
                variable = _variable(source)
                if isinstance(variable, tf.Variable):
                    variable._horovod_reduced = None
        return found

    tf.GradientTape.gradient = gradient


def mark(gradients: Sequence[Any], sources: Sequence[Any], process_set: ProcessSet) -> None:
    """Mark gradients that were reduced over ``process_set``. Elements that are None are skipped."""
    moment = next_number()
    for gradient, source in zip(gradients, sources, strict=True):
        if gradient is None:
            continue
        mark_tensor(gradient, process_set)
        variable = _variable(source)
        if isinstance(variable, tf.Variable):
            variable._horovod_reduced = _OfVariable(process_set, moment)


def mark_tensor(tensor: Any, process_set: ProcessSet) -> Any:
    """Mark one tensor, which may be a gradient, as reduced over ``process_set``. Returns it."""
    tensor._horovod_reduced = process_set
    return tensor


def arrival(gradient: Any, variable: Any, process_set: ProcessSet, since: int) -> Arrival:
    """The state of a gradient at an optimizer that reduces over ``process_set``.

    Args:
        since: when the optimizer was made, see :func:`next_number`.
    """
    own, of_variable = getattr(gradient, "_horovod_reduced", None), _of(variable)
    if own is process_set:
        _take(variable, of_variable)
        return Arrival.REDUCED
    if own is not None or hasattr(gradient, "_horovod_local"):
        return Arrival.LOCAL
    if of_variable is None or of_variable.process_set is not process_set or of_variable.moment <= since:
        return Arrival.CHANGED
    if of_variable.taken:
        return Arrival.UNKNOWN
    _take(variable, of_variable)
    return Arrival.REDUCED


def check_sum(variables: Sequence[Any], process_set: ProcessSet, since: int) -> None:
    """Check that the gradients of no variable were reduced over ``process_set`` since :func:`next_number` returned ``since``.

    Raises:
        ValueError: the gradient of a variable was.
    """
    for variable in variables:
        marked = _of(variable)
        if marked is not None and marked.process_set is process_set and marked.moment > since:
            name = getattr(variable, "path", None) or getattr(variable, "name", "a variable")
            raise ValueError(
                f"the gradient of {name} has been reduced already, in a different function from the one that applies it; "
                "DistributedOptimizer(op=hvd.Sum) would sum it over the ranks again, which multiplies it by their number. "
                "Reduce and apply in one function, or use one of them: tf.GradientTape with the distributed optimizer, or "
                "DistributedGradientTape with the original optimizer"
            )


def _variable(source: Any) -> Any:
    """The variable of TensorFlow for ``source``, which may be a variable of Keras 3."""
    return getattr(source, "_value", source) if hasattr(source, "path") else source


def _of(variable: Any) -> _OfVariable | None:
    return getattr(_variable(variable), "_horovod_reduced", None)


def _take(variable: Any, marked: _OfVariable | None) -> None:
    if marked is not None:
        _variable(variable)._horovod_reduced = marked._replace(taken=True)
