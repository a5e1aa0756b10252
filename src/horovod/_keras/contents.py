"""What variables hold, as arrays: of every version and backend of Keras, also in graphs of TensorFlow 1 with their sessions."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod.comm.datatypes import Array


def read(variables: Sequence[Any]) -> list[Array]:
    """Copies of what they hold, C-contiguous."""
    return [np.array(value, order="C") for value in views(variables)]


def views(variables: Sequence[Any]) -> list[Array]:
    """What they hold: copies, or views that change with the variables, as the backend has it."""
    session = _session(variables)
    values = [each.numpy() for each in variables] if session is None else session.batch_get_value(list(variables))
    return [np.asarray(value) for value in values]


def write(variables: Sequence[Any], arrays: Sequence[Array]) -> None:
    """Have them hold ``arrays``, of their shapes."""
    pairs = list(zip(variables, arrays, strict=True))
    session = _session(variables)
    if session is not None:
        session.batch_set_value(pairs)
        return
    for variable, array in pairs:
        variable.assign(array)


def _session(variables: Sequence[Any]) -> Any:
    """Keras's functions that work in its session; None where there is none."""
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None or tensorflow.executing_eagerly():
        return None
    kinds = (tensorflow.Variable, tensorflow.Tensor)
    return tensorflow.compat.v1.keras.backend if all(isinstance(each, kinds) for each in variables) else None
