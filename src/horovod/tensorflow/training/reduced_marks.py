"""Which gradients a ``DistributedGradientTape`` has reduced, so that a ``DistributedOptimizer`` does not reduce them again.

A gradient that a tape returns has a mark, and so has its variable. The gradient's mark is lost when the user computes
something of it (clips it, or returns it from a function); the variable's mark tells then that there was a reduction.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.core.process_set import ProcessSet

_moments = itertools.count(1)


def now() -> int:
    """A number greater than all before."""
    return next(_moments)


def mark(gradients: Sequence[Any], sources: Sequence[Any], process_set: ProcessSet) -> None:
    """A tape has reduced these over ``process_set``. None is left out."""
    moment = now()
    for gradient, source in zip(gradients, sources, strict=True):
        if gradient is None:
            continue
        gradient._horovod_reduced = process_set
        variable = _variable(source)
        if isinstance(variable, tf.Variable):
            variable._horovod_reduced = process_set, moment


def take(gradient: Any, variable: Any, process_set: ProcessSet) -> bool:
    """Whether a gradient is as a tape has returned it, reduced over ``process_set``. Then the variable loses its mark."""
    if gradient is None or getattr(gradient, "_horovod_reduced", None) is not process_set:
        return False
    of_tensorflow = _variable(variable)
    if isinstance(of_tensorflow, tf.Variable):
        of_tensorflow._horovod_reduced = None
    return True


def check_sum(variables: Sequence[Any], process_set: ProcessSet, since: int) -> None:
    """Raises ValueError if a tape has reduced gradients of one of these over ``process_set`` since a moment."""
    for variable in variables:
        marked = getattr(_variable(variable), "_horovod_reduced", None)
        if marked is not None and marked[0] is process_set and marked[1] > since:
            name = getattr(variable, "path", None) or getattr(variable, "name", "a variable")
            raise ValueError(
                f"DistributedGradientTape has reduced the gradient of {name} already; DistributedOptimizer(op=hvd.Sum) would "
                "add it up over the ranks once more, and multiply it by their number. Use one of them: tf.GradientTape with "
                "the distributed optimizer, or DistributedGradientTape with the optimizer itself"
            )


def _variable(source: Any) -> Any:
    """TensorFlow's variable of a source, which may be Keras 3's."""
    return getattr(source, "_value", source) if hasattr(source, "path") else source
