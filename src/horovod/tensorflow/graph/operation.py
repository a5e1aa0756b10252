"""One place in a graph at which collectives are run, time and again.

In a graph that functions (``tf.function``) run, collectives are three kinds of operations:

    submit    a Python function that hands its inputs to the core and returns a ticket; it never blocks
    wait      a dequeue of the tickets from a queue of this place in the graph; TensorFlow waits, no thread does
    collect   a Python function that returns the outputs, which have arrived, or raises

When the core has finished, the ticket is put into the queue (:mod:`horovod.tensorflow.graph.completions`). So any number of
collectives may be under way in a graph, in another order on every rank, and even one thread between operations is enough.
All three take the queue as an input. TensorFlow keeps operations with side effects on one resource in order, and runs those
on different resources side by side: so collectives do not wait for one another, as functions without a resource would.

A graph that a session runs (TensorFlow 1) cannot be reached by a queue from outside. There the wait is a loop:
:mod:`horovod.tensorflow.graph.session_loop`.

Several submissions may share one wait and one collect: that is how buckets of gradients overlap with backward.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from horovod.core.submission.handle import Handle
from horovod.observe import call_site
from horovod.tensorflow.graph import completions, session_loop

Outputs = Callable[[], list[Any]]
"""Makes eager tensors of what a collective has produced; called once, after it is done."""

Start = Callable[[Sequence[Any], bool], tuple[Handle, Outputs]]
"""``start(inputs, awaited)`` submits eager tensors to the core, and raises what the core raises; ``awaited`` as in
:mod:`horovod.core.submission.collectives`."""


class Submission(NamedTuple):
    """One submission.

    Attributes:
        inputs: tensors, all of the graph that is being built, or all eager.
        start: submits them when the graph is run, or at once.
        outputs: types of what it produces; a dimension that only the other ranks know is None.
    """

    inputs: Sequence[Any]
    start: Start
    outputs: Sequence[tf.TensorSpec]


_tickets = itertools.count(1)
_RUNS_KEPT = 8
"""Runs of a site after which one that was never collected counts as cancelled."""


class _Pending(NamedTuple):
    """A submission, from then until it is collected."""

    handle: Handle
    outputs: Outputs
    number: int


class GraphOperation:
    """The operations of some collectives that share a wait.

    The graph keeps it for as long as TensorFlow keeps graphs, and it keeps nothing of the graph.

    Args:
        in_functions: the graph is run by functions, not by a session.
    """

    def __init__(self, in_functions: bool) -> None:
        self._line = ""
        self._lock = threading.Lock()
        self._under_way: dict[int, _Pending] = {}
        self._submissions = 0
        self._submissions = 0
        self._queue: Any = None
        if in_functions:
            with tf.init_scope():
                self._queue = tf.queue.FIFOQueue(-1, [tf.int64], [()])

    def build(self, name: str, submissions: Sequence[Submission]) -> list[list[Any]]:
        """Add the operations to the graph that is being built; the outputs, leg by leg.

        Args:
            name: of the operation that collects, complete and not used yet.
        """
        self._submissions = len(submissions)
        resource = [] if self._queue is None else [self._queue.queue_ref]
        tickets = []
        for number, submission in enumerate(submissions):
            label = f"{name}_submit" if len(submissions) == 1 else f"{name}_submit_{number}"
            ticket = tf.py_function(
                self._submitter(submission.start), [*resource, *submission.inputs], tf.int64, _exactly(label)
            )
            ticket.set_shape(())
            tickets.append(ticket)
        self._line = _users_line(tickets[0].op)
        if self._queue is None:
            known = [session_loop.wait(tickets, _exactly(f"{name}_wait"))]
        else:
            with tf.control_dependencies(tickets):
                known = [*resource, self._arrival(tickets, _exactly(f"{name}_wait")), *tickets]
        specs = [spec for submission in submissions for spec in submission.outputs]
        types = [spec.dtype for spec in specs]
        outputs = tf.py_function(self._collect, known, types, _exactly(name))
        for output, spec in zip(outputs, specs, strict=True):
            output.set_shape(spec.shape)
        found = iter(outputs)
        return [[next(found) for _ in submission.outputs] for submission in submissions]

    def _arrival(self, tickets: Sequence[Any], label: str) -> Any:
        """As many tickets as these, when they are in the queue."""
        handle = self._queue.queue_ref
        if len(tickets) == 1:
            return tf.raw_ops.QueueDequeueV2(handle=handle, component_types=[tf.int64], name=label)[0]
        return tf.raw_ops.QueueDequeueManyV2(handle=handle, n=len(tickets), component_types=[tf.int64], name=label)[0]

    # What follows runs when the graph does, on TensorFlow's threads.

    def _submitter(self, start: Start) -> Callable[..., int]:
        def submit(*arguments: Any) -> int:
            inputs = arguments if self._queue is None else arguments[1:]
            with call_site.on_behalf_of(self._line):
                handle, outputs = start(inputs, False)
            ticket = next(_tickets)
            with self._lock:
                self._submissions += 1
                self._under_way[ticket] = _Pending(handle, outputs, self._submissions)
                self._forget_cancelled()
            if self._queue is None:
                session_loop.expect(ticket, handle)
            else:
                completions.start()
                handle.then(lambda: completions.deliver(self._queue.queue_ref, ticket))
            return ticket

        return submit

    def _forget_cancelled(self) -> None:
        """Something else in the graph may fail after a submission; then nobody collects it."""
        for ticket, pending in list(self._under_way.items()):
            if pending.number > self._submissions - _RUNS_KEPT * self._submissions or not pending.handle.done():
                return
            del self._under_way[ticket]
            session_loop.forget(ticket)

    def _collect(self, *arguments: Any) -> list[Any]:
        if self._queue is None:
            numbers = [-ticket for ticket in _numbers(arguments[0])]
        else:
            numbers = [int(ticket) for ticket in arguments[2:]]
        with self._lock:
            pendings = [self._under_way.pop(number) for number in numbers]
        if self._queue is None:
            for number in numbers:
                session_loop.forget(number)
        elif set(_numbers(arguments[1])) != set(numbers):
            self._catch_up(pendings)
        for pending in pendings:
            pending.handle.wait()  # does not wait: it is done, or raises why it failed
        return [output for pending in pendings for output in pending.outputs()]

    def _catch_up(self, pendings: Sequence[_Pending]) -> None:
        """The tickets that came were left behind by a run that was cancelled: wait here, this once, and clear the queue."""
        for pending in pendings:
            try:
                pending.handle.wait()
            except Exception:
                pass  # raised by who collects
        with self._lock:
            left = 0 if self._under_way else int(tf.raw_ops.QueueSizeV2(handle=self._queue.queue_ref))
            if left:
                tf.raw_ops.QueueDequeueManyV2(handle=self._queue.queue_ref, n=left, component_types=[tf.int64])


def _numbers(tickets: Any) -> list[int]:
    return [int(ticket) for ticket in tickets.numpy().reshape(-1)]


def _exactly(name: str) -> str:
    """A name that TensorFlow takes as it is, whatever scope it is in."""
    return f"{name}/"


def _users_line(operation: Any) -> str:
    """``file:line`` of the user's code that made an operation; TensorFlow sees through what it makes of functions."""
    for frame in reversed(operation.traceback or []):
        if call_site.is_users(frame.filename):
            return f"{frame.filename}:{frame.lineno}"
    return call_site.caller()
