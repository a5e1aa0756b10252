"""Python functions that graphs call under fixed names.

``tf.py_function`` numbers functions within one process, so in the process that loads it, a saved graph calls a wrong function
or none. Graphs call Horovod's functions by name, as they call a library's operations: a SavedModel that contains collectives
runs in every process that has imported ``horovod.tensorflow``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.ops import script_ops

_called: list[_Callback] = []
"""Keeps the functions alive: TensorFlow's own table refers to them weakly."""


class _Callback(script_ops.EagerFunc):  # type: ignore[misc]  # untyped base
    """An entry of TensorFlow's table of functions. It takes eager tensors, and returns one or several, in host memory."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function, [], is_grad_func=False)

    def __call__(self, device: Any, token: Any, args: Sequence[Any]) -> Any:
        with context.eager_mode():
            return self._func(*args)


class Callback:
    """A Python function that graphs call by a fixed name.

    Args:
        name: the name of the function in graphs. Saved graphs contain it, so it must not change.
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
            inputs: the tensors that the function gets.
            types: the dtypes of the outputs.
            name: the name of the operation. TensorFlow uses a name that ends with a slash as it is, without the scope.
        """
        found: list[Any] = tf.raw_ops.EagerPyFunc(
            input=list(inputs), token=self._name, is_async=False, Tout=list(types), name=name
        )
        return found
