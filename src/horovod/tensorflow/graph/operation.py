"""One operation of Horovod in a TensorFlow graph: one or several collectives that the graph waits for together.

In a graph that functions (``tf.function``) run, it is made of three kinds of TensorFlow operations:

    submit    a Python function that submits its inputs to the core and returns a ticket. It never blocks.
    wait      a dequeue of the tickets from a queue. TensorFlow waits; no thread does.
    collect   a Python function that returns the outputs, which have arrived, or raises.

When the core has finished a collective, its ticket is put into the queue (:mod:`horovod.tensorflow.graph.completions`). So
any number of collectives may be in flight in a graph, in a different order on every rank, even if TensorFlow runs operations on
a single thread. All three take the queue as an input: TensorFlow keeps operations with side effects on one resource in order,
and runs those on different resources concurrently. Python functions without a resource would run one after the other.

A graph that a session runs (TensorFlow 1) cannot be reached by a queue from outside. There the wait is a loop:
:mod:`horovod.tensorflow.graph.session_loop`.

Several submissions may share one wait and one collect. That is how buckets of gradients overlap with backward.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from horovod.core.errors import MismatchError
from horovod.core.negotiation.agreement import MISMATCHED
from horovod.core.requests.handle import Handle
from horovod.observe import call_site
from horovod.tensorflow.device import tell_of_graphs
from horovod.tensorflow.graph import completions, session_loop

Outputs = Callable[[], list[Any]]
"""Makes eager tensors of a collective's results. Called once, after the collective is done."""

Start = Callable[[Sequence[Any], bool], tuple[Handle, Outputs]]
"""``start(inputs, awaited)`` submits eager tensors to the core, and raises what the core raises; ``awaited`` as in
:mod:`horovod.core.submission.collectives`."""


class Submission(NamedTuple):
    """One collective, to be submitted to the core at once or when a graph runs.

    Attributes:
        inputs: tensors, all of the graph that is being built, or all eager.
        start: submits them.
        outputs: shapes and types of the results. A dimension that depends on other ranks is None.
        mismatch: what to add to the error if the ranks disagree on ``Request.alike`` in a graph.
    """

    inputs: Sequence[Any]
    start: Start
    outputs: Sequence[tf.TensorSpec]
    mismatch: str = ""


_tickets = itertools.count(1)
_RUNS_KEPT = 8
"""A submission that was not collected within this many runs of its graph counts as cancelled."""


class _Pending(NamedTuple):
    """A collective that is submitted and not yet collected.

    Attributes:
        number: counts the submissions of one :class:`GraphOperation`.
        mismatch: as of :class:`Submission`.
    """

    handle: Handle
    outputs: Outputs
    number: int
    mismatch: str

    def wait(self) -> None:
        """Return if the collective has succeeded, and raise its error otherwise. It is done."""
        try:
            self.handle.wait()
        except MismatchError as error:
            if self.mismatch and str(error).startswith(MISMATCHED):
                raise error.extended(self.mismatch) from None
            raise


class GraphOperation:
    """The submissions of one operation in a graph, over all runs of the graph.

    The graph refers to this object; this object does not refer to the graph.

    Args:
        in_functions: functions run the graph, not a session.
    """

    def __init__(self, in_functions: bool) -> None:
        self._line = ""
        self._lock = threading.Lock()
        self._in_flight: dict[int, _Pending] = {}
        self._per_run = 0
        self._submitted = 0
        self._queue: Any = None
        if in_functions:
            with tf.init_scope():
                self._queue = tf.queue.FIFOQueue(-1, [tf.int64], [()])

    def build(self, name: str, submissions: Sequence[Submission]) -> list[list[Any]]:
        """Add the operations to the graph that is being built. Returns the outputs of each submission.

        Args:
            name: of the operation that collects; complete and unused in the graph.
        """
        self._per_run = len(submissions)
        resource = [] if self._queue is None else [self._queue.queue_ref]
        tickets = []
        for number, submission in enumerate(submissions):
            label = f"{name}_submit" if len(submissions) == 1 else f"{name}_submit_{number}"
            ticket = tf.py_function(
                self._submitter(submission), [*resource, *submission.inputs], tf.int64, _exactly(label)
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
        """Add the wait: it returns as many tickets as ``tickets`` has, once they are in the queue."""
        handle = self._queue.queue_ref
        if len(tickets) == 1:
            return tf.raw_ops.QueueDequeueV2(handle=handle, component_types=[tf.int64], name=label)[0]
        return tf.raw_ops.QueueDequeueManyV2(handle=handle, n=len(tickets), component_types=[tf.int64], name=label)[0]

    # The functions below run when the graph runs, on TensorFlow's threads.

    def _submitter(self, submission: Submission) -> Callable[..., int]:
        start, mismatch = submission.start, submission.mismatch

        def submit(*arguments: Any) -> int:
            inputs = arguments if self._queue is None else arguments[1:]
            tell_of_graphs()
            with call_site.on_behalf_of(self._line):
                handle, outputs = start(inputs, False)
            ticket = next(_tickets)
            with self._lock:
                self._submitted += 1
                self._in_flight[ticket] = _Pending(handle, outputs, self._submitted, mismatch)
                self._forget_cancelled()
            if self._queue is None:
                session_loop.expect(ticket, handle)
            else:
                completions.start()
                handle.then(lambda: completions.complete(self._queue.queue_ref, ticket))
            return ticket

        return submit

    def _forget_cancelled(self) -> None:
        """Drop old submissions that nothing collects, because another operation of the graph failed after them."""
        for ticket, pending in list(self._in_flight.items()):
            if pending.number > self._submitted - _RUNS_KEPT * self._per_run or not pending.handle.done():
                return
            del self._in_flight[ticket]
            session_loop.forget(ticket)

    def _collect(self, *arguments: Any) -> list[Any]:
        if self._queue is None:
            numbers = [-ticket for ticket in _numbers(arguments[0])]
        else:
            numbers = [int(ticket) for ticket in arguments[2:]]
        with self._lock:
            pendings = [self._in_flight.pop(number) for number in numbers]
        if self._queue is None:
            for number in numbers:
                session_loop.forget(number)
        elif set(_numbers(arguments[1])) != set(numbers):
            self._catch_up(pendings)
        for pending in pendings:
            pending.wait()
        return [output for pending in pendings for output in pending.outputs()]

    def _catch_up(self, pendings: Sequence[_Pending]) -> None:
        """Wait for ``pendings`` here, and clear the queue: the tickets in it are left over from a run that was cancelled."""
        for pending in pendings:
            try:
                pending.handle.wait()
            except Exception:
                pass  # _collect() raises it
        with self._lock:
            left = 0 if self._in_flight else int(tf.raw_ops.QueueSizeV2(handle=self._queue.queue_ref))
            if left:
                tf.raw_ops.QueueDequeueManyV2(handle=self._queue.queue_ref, n=left, component_types=[tf.int64])


def _numbers(tickets: Any) -> list[int]:
    return [int(ticket) for ticket in tickets.numpy().reshape(-1)]


def _exactly(name: str) -> str:
    """``name`` in the form that TensorFlow takes without adding the current scope."""
    return f"{name}/"


def _users_line(operation: Any) -> str:
    """``file:line`` of the user's code that made an operation. TensorFlow's traceback also covers functions it rewrote."""
    for frame in reversed(operation.traceback or []):
        if call_site.is_users(frame.filename):
            return f"{frame.filename}:{frame.lineno}"
    return call_site.caller()
