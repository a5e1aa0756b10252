"""The names of collectives: of their operations in a graph, and of their requests, which must be the same on all ranks.

In a graph, a collective's name is derived from the name of its tensor. Every trace of a function gives the same name, whenever
it happens. Eager tensors have no names, so the n-th unnamed call of one rank matches the n-th unnamed call of every other rank.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections import Counter
from typing import Any, NamedTuple

import tensorflow as tf

from horovod.core.submission.arguments import full_name

_NUMBERED = re.compile(r"(.*/)?\d+(_\d+)?:\d+")
_FORBIDDEN = re.compile(r"[^A-Za-z0-9_]")
_UNIQUE = re.compile(r"_\d+$")  # TensorFlow's numbers of branches and bodies in one process
_CALL = type(tf.function(lambda: None))._call.__code__


def outermost(graph: Any) -> Any:
    """The graph that is built around ``graph``; ``graph`` itself if it is in none."""
    while getattr(getattr(graph, "outer_graph", None), "building_function", False):
        graph = graph.outer_graph
    return graph


def _normalize_name(name: str) -> str:
    """``name``, with every character that is not allowed in the name of an operation replaced by ``_``."""
    return _FORBIDDEN.sub("_", name)


class Name(NamedTuple):
    """The names of one collective.

    Attributes:
        node: the complete name of the operation in the graph. In eager execution, the name in errors.
        negotiated: the name in requests, without the kind of operation. None: the core numbers the call.
    """

    node: str
    negotiated: str | None


def collective_name(kind: str, name: str | None, tensors: list[Any], ignore_name_scope: bool = False) -> Name:
    """The name of a collective that is about to be run or added to a graph.

    Args:
        kind: for example ``HorovodAllreduce``.
        name: the name that the user gave, or None.
        tensors: the inputs of the collective.
        ignore_name_scope: whether the graph's name scopes are left out of ``negotiated``.

    Raises:
        as :func:`~horovod.core.submission.arguments.full_name`.
    """
    name = full_name(kind, name).removeprefix(f"{kind}.") or None  # raises if it is not a name
    if tf.executing_eagerly():
        return Name(name or kind, name)
    if not name:
        ends = [tensors[0], tensors[-1]] if len(tensors) > 1 else tensors[:1]
        own = "_".join(_normalize_name(_tensor_name(tensor)) for tensor in ends)
        node = f"{kind}_{own}" if own else kind
    else:
        node = _operation_name(name)
    graph = tf.compat.v1.get_default_graph()
    full = graph.unique_name(node)
    negotiated = full.removeprefix(f"{kind}_")
    if ignore_name_scope:
        negotiated = full.rpartition("/")[2].removeprefix(f"{kind}_")
    return Name(full, _once(graph, kind, negotiated))


def _tensor_name(tensor: Any) -> str:
    """The tensor's name, or "captured" for a tensor from outside of the function: its number differs between ranks."""
    return "captured" if _NUMBERED.fullmatch(tensor.name) else str(tensor.name)


def _operation_name(name: str) -> str:
    """``name``, changed to a legal name of an operation."""
    legal = re.sub(r"[^A-Za-z0-9_.\\/>-]", "_", name)
    return legal if re.match(r"[A-Za-z0-9.]", legal) else f"x{legal}"


def _once(graph: Any, kind: str, name: str) -> str:
    """``name``, with a number appended if the function that is being traced has used it in another of its graphs.

    A graph that TensorFlow discards and builds again counts as the same graph. This happens when a function creates variables
    in its first call, and on another rank these may already exist.
    """
    uses: Counter[str] | None = getattr(graph, "_horovod_uses", None)
    if uses is None:
        uses = graph._horovod_uses = Counter()
    uses[f"{kind}.{name}"] += 1
    use: list[Any] = [uses[f"{kind}.{name}"], *_being_traced()]
    while getattr(getattr(graph, "outer_graph", None), "building_function", False):
        use.append((_UNIQUE.sub("", graph.name), repr(graph.structured_input_signature)))
        graph = graph.outer_graph
    used: dict[str, list[list[Any]]] | None = getattr(graph, "_horovod_names", None)
    if used is None:
        used = graph._horovod_names = {}
    uses_of_name = used.setdefault(f"{kind}.{name}", [])
    if use not in uses_of_name:
        uses_of_name.append(use)
    number = uses_of_name.index(use)
    return name if number == 0 else f"{name}_{number}"


def _being_traced() -> list[weakref.ref[Any]]:
    """References to the functions that are being traced, innermost first. Their names would not identify them."""
    found: list[weakref.ref[Any]] = []
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is _CALL:
            found.append(weakref.ref(frame.f_locals["self"]))
    return found
