"""How a graph that a session runs (TensorFlow 1) waits for collectives.

Nothing outside of a session can put tickets into its queues, so the wait is a loop: each iteration waits for a handle for a
moment, and lets TensorFlow run other operations in between. All collectives of a graph share the two functions of the loop:
each time the graph has grown, a session processes the whole graph with all its functions, so a collective adds only a few nodes
and no functions.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from horovod.core.requests.handle import Handle

_MOMENT = 0.001
"""How many seconds a session's thread waits for a collective before it runs other operations."""

_lock = threading.Lock()
_handles: dict[int, Handle] = {}
"""The handles that sessions wait for, by ticket."""


class _Loop(NamedTuple):
    """The parts that all loops of one graph share.

    Attributes:
        pauses: an iterator, see :func:`_pause`.
        condition, body: the functions of the loop. They take the tickets and ``pauses``.
    """

    pauses: Any
    condition: Any
    body: Any


def expect(ticket: int, handle: Handle) -> None:
    """Record the handle of a ticket, which the loop of :func:`wait` looks up. Called when the graph runs."""
    with _lock:
        _handles[ticket] = handle


def forget(ticket: int) -> None:
    """Forget the handle of a ticket that was collected, or never will be."""
    with _lock:
        _handles.pop(ticket, None)


def wait(tickets: Sequence[Any], name: str) -> Any:
    """Add a loop to the graph that is being built. When all tickets are done, it returns them with their signs reversed.

    Args:
        tickets: int64 scalars, greater than 0.
        name: the name of the operation.
    """
    waiting = tickets[0] if len(tickets) == 1 else tf.stack(tickets)
    loop = _loop_of(waiting.graph)
    return tf.raw_ops.While(
        input=[waiting, loop.pauses], cond=loop.condition, body=loop.body, parallel_iterations=1, name=name
    )[0]


def _loop_of(graph: Any) -> _Loop:
    while getattr(graph, "outer_graph", None) is not None:
        graph = graph.outer_graph
    found: _Loop | None = getattr(graph, "_horovod_loop", None)
    if found is None:
        with graph.as_default(), tf.control_dependencies(None), tf.name_scope(""):
            found = graph._horovod_loop = _make_loop()
    return found


def _make_loop() -> _Loop:
    pauses = tf.compat.v1.data.make_one_shot_iterator(tf.data.Dataset.range(1).repeat())._iterator_resource

    def condition(tickets: Any, pauses: Any) -> Any:
        return tf.reduce_any(tickets > 0)

    def body(tickets: Any, pauses: Any) -> Any:
        with tf.control_dependencies(_pause(pauses)):
            looked = tf.py_function(_look, [tickets], tf.int64)
        looked.set_shape(tickets.shape)
        return looked, pauses

    types = [tf.TensorSpec(None, tf.int64), tf.TensorSpec([], tf.resource)]
    made = [tf.function(each, types, autograph=False).get_concrete_function() for each in (condition, body)]
    return _Loop(pauses, *made)


def _pause(pauses: Any) -> Any:
    """Get an element of the iterator. Meanwhile TensorFlow's thread can run other operations.

    A thread first runs the operations that it has made ready itself, so a plain loop would occupy it. A data set returns
    elements on its own threads, and the operations that depend on these are queued behind others.
    """
    return tf.raw_ops.IteratorGetNext(iterator=pauses, output_types=[tf.int64], output_shapes=[[]])


def _look(tickets: Any) -> Any:
    """Return the tickets, with their signs reversed if all are done. Runs when the graph runs, on TensorFlow's threads."""
    for ticket in tickets.numpy().reshape(-1).tolist():
        try:
            _handles[ticket].wait(_MOMENT)
        except TimeoutError:
            return tickets
        except Exception:
            pass  # it is done too; the collecting operation raises
    return -tickets
