"""Marks the gradients that a ``DistributedGradientTape`` has reduced. A ``DistributedOptimizer`` does not reduce these again.

The tape marks each gradient that it returns, and its variable. A gradient loses its mark when the script computes with it, for
example clips it, or returns it from a function. Then the mark of the variable still shows that there was a reduction.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.core.lifecycle.process_set import ProcessSet

_moments = itertools.count(1)


def now() -> int:
    """A number that is greater than all numbers returned before."""
    return next(_moments)


def mark(gradients: Sequence[Any], sources: Sequence[Any], process_set: ProcessSet) -> None:
    """Mark gradients that a tape has reduced over ``process_set``. Elements that are None are skipped."""
    moment = now()
    for gradient, source in zip(gradients, sources, strict=True):
        if gradient is None:
            continue
        gradient._horovod_reduced = process_set
        variable = _variable(source)
        if isinstance(variable, tf.Variable):
            variable._horovod_reduced = process_set, moment


def take(gradient: Any, variable: Any, process_set: ProcessSet) -> bool:
    """Whether a tape has returned this gradient, reduced over ``process_set``. If so, the variable loses its mark."""
    if gradient is None or getattr(gradient, "_horovod_reduced", None) is not process_set:
        return False
    of_tensorflow = _variable(variable)
    if isinstance(of_tensorflow, tf.Variable):
        of_tensorflow._horovod_reduced = None
    return True


def check_sum(variables: Sequence[Any], process_set: ProcessSet, since: int) -> None:
    """Check that no tape has reduced a variable's gradient over ``process_set`` since :func:`now` returned ``since``.

    Raises:
        ValueError: a tape has.
    """
    for variable in variables:
        marked = getattr(_variable(variable), "_horovod_reduced", None)
        if marked is not None and marked[0] is process_set and marked[1] > since:
            name = getattr(variable, "path", None) or getattr(variable, "name", "a variable")
            raise ValueError(
                f"DistributedGradientTape has reduced the gradient of {name} already; DistributedOptimizer(op=hvd.Sum) would "
                "add it up over the ranks once more, and multiply it by their number. Use one of them: tf.GradientTape with "
                "the distributed optimizer, or DistributedGradientTape with the original optimizer"
            )


def _variable(source: Any) -> Any:
    """The variable of TensorFlow for ``source``, which may be a variable of Keras 3."""
    return getattr(source, "_value", source) if hasattr(source, "path") else source
