"""Functions that the operations of a graph call while the graph exists, by numbers that are valid only in this process.

The numbers begin at a random one, so those in a graph that another process has saved call nothing here.
"""

from __future__ import annotations

import itertools
import secrets
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from horovod.tensorflow.graph.names import outermost

_functions: dict[int, Callable[..., Any]] = {}
_numbers = itertools.count(1 + secrets.randbits(62))


def number(function: Callable[..., Any] | None) -> int:
    """A number by which the graph that is being built can record a function. 0: there is no function, or no graph."""
    if function is None or tf.executing_eagerly():
        return 0
    own = next(_numbers)
    _functions[own] = function
    graph = outermost(tf.compat.v1.get_default_graph())
    weakref.finalize(graph, _functions.pop, own, None).atexit = False
    return own


def call(own: int, *arguments: Any) -> Any:
    """What the function with this number returns. None: this process has no such function."""
    function = _functions.get(own)
    return None if function is None else function(*arguments)
