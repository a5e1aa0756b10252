"""What collectives are called: in the graph, and among the ranks, where names must be the same everywhere.

In a graph a name is derived from the tensor's, so it does not depend on when the graph was made, and is the same each time a
function is traced. Eager tensors have no names; the n-th unnamed calls of all ranks belong together.
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
_UNIQUE = re.compile(r"_\d+$")  # what TensorFlow tells branches and bodies of one process apart by
_CALL = type(tf.function(lambda: None))._call.__code__


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
    if full_name(kind, name):  # refuses what is no name
        name = str.__str__(name)  # of a subclass's, too
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
    """The tensor's name; of one made outside of the function it is a number that differs by rank, and does not count."""
    return "captured" if _NUMBERED.fullmatch(tensor.name) else str(tensor.name)


def _operation_name(name: str) -> str:
    """``name`` as an operation may be called."""
    legal = re.sub(r"[^A-Za-z0-9_.\\/>-]", "_", name)
    return legal if re.match(r"[A-Za-z0-9.]", legal) else f"x{legal}"


def _once(graph: Any, kind: str, name: str) -> str:
    """``name``, or with a number behind it where the function that is being traced has used it in another of its graphs.

    A graph that TensorFlow makes anew, and throws the first one away, is the same graph: it does so with a function that
    creates variables when it is first called, and another rank may have these already.
    """
    uses: Counter[str] | None = getattr(graph, "_horovod_uses", None)
    if uses is None:
        uses = graph._horovod_uses = Counter()
    uses[f"{kind}.{name}"] += 1
    place: list[Any] = [uses[f"{kind}.{name}"], *_being_traced()]
    while getattr(getattr(graph, "outer_graph", None), "building_function", False):
        place.append((_UNIQUE.sub("", graph.name), repr(graph.structured_input_signature)))
        graph = graph.outer_graph
    used: dict[str, list[list[Any]]] | None = getattr(graph, "_horovod_names", None)
    if used is None:
        used = graph._horovod_names = {}
    places = used.setdefault(f"{kind}.{name}", [])
    if place not in places:
        places.append(place)
    number = places.index(place)
    return name if number == 0 else f"{name}_{number}"


def _being_traced() -> list[weakref.ref[Any]]:
    """The functions that are being traced, innermost first. Their names do not tell them apart."""
    found: list[weakref.ref[Any]] = []
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is _CALL:
            found.append(weakref.ref(frame.f_locals["self"]))
    return found
