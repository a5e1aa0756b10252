"""Reads and writes the values of variables as arrays.

This works for every version and backend of Keras, and for graphs of TensorFlow 1 and their sessions.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod.comm.datatypes import Array, data_type_of
from horovod.core.requests.tensor import Tensor


def described(array: Array) -> Tensor:
    """A C-contiguous array as a tensor of the core. Nothing is copied."""
    return Tensor(array.reshape(-1), data_type_of(array), array.shape)


def read(variables: Sequence[Any]) -> list[Array]:
    """C-contiguous copies of the variables' values."""
    return [np.array(value, order="C") for value in views(variables)]


def views(variables: Sequence[Any]) -> list[Array]:
    """The variables' values. Depending on the backend, these are copies, or views that change with the variables."""
    session = _session(variables)
    values = [each.numpy() for each in variables] if session is None else session.batch_get_value(list(variables))
    return [np.asarray(value) for value in values]


def write(variables: Sequence[Any], arrays: Sequence[Array]) -> None:
    """Assign ``arrays`` to the variables. The shapes must be equal."""
    pairs = list(zip(variables, arrays, strict=True))
    session = _session(variables)
    if session is not None:
        session.batch_set_value(pairs)
        return
    for variable, array in pairs:
        variable.assign(array)


def _session(variables: Sequence[Any]) -> Any:
    """Keras's functions that work in its session, or None if there is no session."""
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None or tensorflow.executing_eagerly():
        return None
    kinds = (tensorflow.Variable, tensorflow.Tensor)
    return tensorflow.compat.v1.keras.backend if all(isinstance(each, kinds) for each in variables) else None
