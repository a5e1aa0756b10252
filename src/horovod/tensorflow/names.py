"""What collectives are called: in the graph, and among the ranks, where names must be the same everywhere.

In a graph a name is derived from the tensor's, so it does not depend on when the graph was made, and is the same each time a
function is traced. Eager tensors have no names; the n-th unnamed calls of all ranks belong together.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, NamedTuple

import tensorflow as tf

_NUMBERED = re.compile(r"(.*/)?\d+(_\d+)?:\d+")
_FORBIDDEN = re.compile(r"[^A-Za-z0-9_]")


def _normalize_name(name: str) -> str:
    """``name`` with every character that operations cannot have in theirs replaced by ``_``."""
    return _FORBIDDEN.sub("_", name)


class Name(NamedTuple):
    """What one collective is called.

    Attributes:
        node: the complete name of the operation in the graph; in eager execution, what errors call it.
        negotiated: what the ranks know it by, without the kind of operation; None for a counted name.
    """

    node: str
    negotiated: str | None


def collective_name(kind: str, name: str | None, tensors: list[Any], ignore_name_scope: bool = False) -> Name:
    """The name of a collective that is about to be run or added to a graph.

    Args:
        kind: for example ``HorovodAllreduce``.
        name: what the user calls it.
        tensors: its inputs.
        ignore_name_scope: whether ranks leave out the scopes that the graph puts before the name.
    """
    if tf.executing_eagerly():
        return Name(name or kind, name)
    if name is None:
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
    """The tensor's name; of one made outside of the function it is a number that differs by rank, and does not count."""
    return "captured" if _NUMBERED.fullmatch(tensor.name) else str(tensor.name)


def _operation_name(name: str) -> str:
    """``name`` as an operation may be called."""
    legal = re.sub(r"[^A-Za-z0-9_.\\/>-]", "_", name)
    return legal if re.match(r"[A-Za-z0-9.]", legal) else f"x{legal}"


def _once(graph: Any, kind: str, name: str) -> str:
    """``name``, or with a number behind it where the function that is being traced has used it in another of its graphs."""
    while getattr(getattr(graph, "outer_graph", None), "building_function", False):
        graph = graph.outer_graph
    used: Counter[str] | None = getattr(graph, "_horovod_names", None)
    if used is None:
        used = graph._horovod_names = Counter()
    used[f"{kind}.{name}"] += 1
    count = used[f"{kind}.{name}"]
    return name if count == 1 else f"{name}_{count - 1}"
