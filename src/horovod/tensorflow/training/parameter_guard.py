"""Compares the variables of a gradient tape between the ranks: :mod:`horovod.comparison.guard`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.comparison import guard
from horovod.comparison.alike import Value
from horovod.comparison.looks import part_of
from horovod.comparison.rotation import LookedAt, TensorPart
from horovod.core.lifecycle.process_set import ProcessSet
from horovod.observe.call_site import caller
from horovod.tensorflow.graph.counted_names import counted
from horovod.tensorflow.training.step_watch import StepWatch

_GUARD = "_horovod_guard"


def of_sources(sources: Sequence[Any], process_set: ProcessSet) -> StepWatch | None:
    """The functions that watch steps in which the gradients of ``sources`` are reduced. None unless all sources are
    floating-point variables of TensorFlow 2.

    The guard is an attribute of the first variable, because each step makes a new tape.
    """
    variables = [getattr(each, "_value", each) if hasattr(each, "path") else each for each in sources]
    if not variables or not all(_readable(each) for each in variables):
        return None
    guards: dict[object, guard.Guard] = variables[0].__dict__.setdefault(_GUARD, {})
    key = process_set, tuple(map(id, variables))
    if key not in guards:
        line = caller()
        guards[key] = guard.Guard(process_set, line, f"the gradients asked for at {line}")
    own = guards[key]
    chosen = guard.compared_parameters(variables)
    names = dict(zip(guard.labels(len(chosen)), (f"variable {each.name}" for each in chosen), strict=True))
    if own.debugs:
        names |= guard.names_of_all([f"variable {each.name}" for each in variables])
    kind = (len(variables), tuple(str(each.shape) for each in chosen))

    counted(lambda: own.choose_name(kind))

    def samples() -> dict[str, Value]:
        return guard.beginnings([tf.reshape(each, [-1])[: guard.ELEMENTS].numpy() for each in chosen])

    def contents() -> dict[str, str]:
        return guard.contents([each.numpy() for each in variables])

    every = LookedAt(len(variables), lambda number, place: part(variables[number], place))
    return StepWatch(lambda: own.step(kind, dict, samples, names, contents, every), own.see if own.debugs else None)


def part(variable: Any, place: int) -> TensorPart | None:
    """Some elements of a variable in host memory; None if it is elsewhere."""
    if "GPU" in variable.device:
        return None
    begin, apart = part_of(int(variable.shape.num_elements()), place)
    values = tf.reshape(variable, [-1])[begin::apart]
    kind = variable.dtype.name
    return TensorPart(
        f"variable {variable.name}", kind, (tf.cast(values, tf.float32) if kind == "bfloat16" else values).numpy
    )


def _readable(source: Any) -> bool:
    """Whether a source is a floating-point variable that has a value outside of graphs."""
    return (
        isinstance(source, tf.Variable)
        and hasattr(getattr(source, "handle", None), "numpy")
        and source.dtype.is_floating
    )
