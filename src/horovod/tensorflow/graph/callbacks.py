"""Python functions that graphs call under fixed names.

``tf.py_function`` numbers functions per process, so a graph that is saved calls no function, or another one, in the process
that loads it. Horovod's functions are called by name, as TensorFlow calls a library's operations: a SavedModel that contains
collectives runs in every process that has imported ``horovod.tensorflow``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.ops import script_ops

_called: list[_Callback] = []
"""TensorFlow's own table refers to them weakly."""


class _Callback(script_ops.EagerFunc):  # type: ignore[misc]  # untyped base
    """An entry of TensorFlow's table of functions. It gets eager tensors, and returns one or a list of them, in host memory."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function, [], is_grad_func=False)

    def __call__(self, device: Any, token: Any, args: Sequence[Any]) -> Any:
        with context.eager_mode():
            return self._func(*args)


class Callback:
    """A Python function that graphs call by a fixed name.

    Args:
        name: of the function in graphs. Saved graphs have it, so it must not change.
        function: takes eager tensors, and returns an eager tensor in host memory, or a list of them.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        made = _Callback(function)
        _called.append(made)
        script_ops._py_funcs._funcs[name] = made
        self._name = name

    def add(self, inputs: Sequence[Any], types: Sequence[tf.DType], name: str) -> list[Any]:
        """Add a call to the graph that is being built. Returns its outputs.

        Args:
            name: of the operation; one that ends with a slash is complete.
        """
        found: list[Any] = tf.raw_ops.EagerPyFunc(
            input=list(inputs), token=self._name, is_async=False, Tout=list(types), name=name
        )
        return found
