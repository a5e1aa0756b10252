"""Functions that the operations of a graph call while the graph exists, by numbers that are valid only in this process.

The numbers begin at a random one, so those in a graph that another process has saved call nothing here.
"""

from __future__ import annotations

import itertools
import secrets
import weakref
from collections.abc import Callable

import tensorflow as tf

_functions: dict[int, Callable[[], None]] = {}
_numbers = itertools.count(1 + secrets.randbits(62))


def number(function: Callable[[], None] | None) -> int:
    """A number by which the graph that is being built can record a function. 0: there is no function, or no graph."""
    if function is None or tf.executing_eagerly():
        return 0
    graph = tf.compat.v1.get_default_graph()
    while getattr(getattr(graph, "outer_graph", None), "building_function", False):
        graph = graph.outer_graph
    own = next(_numbers)
    _functions[own] = function
    weakref.finalize(graph, _functions.pop, own, None).atexit = False
    return own


def call(own: int) -> None:
    """Call the function with this number, if this process has one."""
    function = _functions.get(own)
    if function is not None:
        function()
