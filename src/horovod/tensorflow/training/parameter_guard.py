"""Compares the variables of a gradient tape between the ranks, once: :mod:`horovod._models.guard`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod._models import guard
from horovod.core.lifecycle.process_set import ProcessSet
from horovod.observe.call_site import caller

_GUARD = "_horovod_guard"


def of_sources(sources: Sequence[Any], process_set: ProcessSet) -> Callable[[], None] | None:
    """What to call in each step that reduces the gradients of these sources. None: they are not variables, or of TensorFlow 1.

    The guard belongs to the variables, since a tape is made anew in each step.
    """
    variables = [getattr(each, "_value", each) if hasattr(each, "path") else each for each in sources]
    if not variables or not all(_readable(each) for each in variables):
        return None
    guards: dict[object, guard.Guard] = variables[0].__dict__.setdefault(_GUARD, {})
    key = process_set, tuple(map(id, variables))
    if key not in guards:
        guards[key] = guard.Guard(process_set, caller())
    own = guards[key]
    chosen = guard.some(variables)
    names = dict(zip(guard.labels(len(chosen)), (f"variable {each.name}" for each in chosen), strict=True))
    kind = (len(variables), tuple(str(each.shape) for each in chosen))

    own.be_named(kind)

    def samples() -> dict[str, str]:
        return guard.digests([tf.reshape(each, [-1])[: guard.ELEMENTS].numpy() for each in chosen])

    return lambda: own.step(kind, dict, samples, names)


def _readable(source: Any) -> bool:
    """Whether a source is a variable that has a value outside of graphs."""
    return (
        isinstance(source, tf.Variable)
        and hasattr(getattr(source, "handle", None), "numpy")
        and source.dtype.is_floating
    )
