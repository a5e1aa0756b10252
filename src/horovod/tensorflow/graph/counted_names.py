"""Names that are counted from 0 in each generation of the runtime, such as those of optimizers, in graphs that run in several.

A graph records the names that it was traced with. A process that joins the job later traces its own graph, and counts from the
beginning. So when a graph runs in a later generation, all of its names are asked for again, in the order in which they were
when it was traced.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import msgspec
import tensorflow as tf

from horovod._bindings.optimizer_name import OPTIMIZER_NAME
from horovod.core.lifecycle.context import running
from horovod.tensorflow.graph.names import outermost
from horovod.tensorflow.graph.recorded import Collective

_ATTRIBUTE = "_horovod_counted_names"


class _Traced:
    """The names of one outermost graph. The graph owns them, because their functions may refer to it."""

    def __init__(self) -> None:
        self.generations: dict[str, int] = {}
        """In which generation each operation was traced."""
        self._functions: dict[tuple[int, str], Callable[[], str]] = {}
        self._lock = threading.Lock()
        self._generation = -1
        self._present: dict[tuple[int, str], str] = {}

    def add(self, name: Callable[[], str]) -> str:
        found = name()
        self._functions.setdefault((running().generation, found), name)
        return found

    def present(self, traced: int, collective: Collective) -> Collective:
        """A collective that was traced in another generation, with the names of the running one."""
        generation = running().generation
        with self._lock:
            if self._generation != generation:
                self._present = {key: name() for key, name in self._functions.items()}
                self._generation = generation
        name = getattr(collective, "name", None)
        if name is None:
            return collective
        counted = OPTIMIZER_NAME.sub(lambda found: self._present.get((traced, found[0]), found[0]), name)
        return collective if counted == name else msgspec.structs.replace(collective, name=counted)


_graphs: weakref.WeakValueDictionary[str, _Traced] = weakref.WeakValueDictionary()
"""The names of the graph that an operation belongs to, by operation as in
:class:`~horovod.tensorflow.graph.recorded.GraphSubmission`."""


def counted(name: Callable[[], str]) -> str:
    """What ``name`` returns, an optimizer's name in the running generation. If a graph is being built, it is called again when
    the graph runs in another generation.
    """
    if tf.executing_eagerly():
        return name()
    graph = outermost(tf.compat.v1.get_default_graph())
    traced: _Traced | None = getattr(graph, _ATTRIBUTE, None)
    if traced is None:
        traced = _Traced()
        setattr(graph, _ATTRIBUTE, traced)
    return traced.add(name)


def built(operation: str) -> None:
    """Note that ``operation`` is part of the graph that is being built."""
    traced: _Traced | None = getattr(outermost(tf.compat.v1.get_default_graph()), _ATTRIBUTE, None)
    if traced is not None:
        traced.generations[operation] = running().generation
        _graphs[operation] = traced


def present(operation: str, collective: Collective) -> Collective:
    """The collective that an operation submits when it runs: with the names of the running generation.

    Raises:
        HorovodInternalError: no generation runs.
    """
    traced = _graphs.get(operation)
    if traced is None or traced.generations[operation] == running().generation:
        return collective
    return traced.present(traced.generations[operation], collective)
