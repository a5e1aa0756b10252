"""One operation of Horovod in a TensorFlow graph: one or several collectives that the graph waits for together.

In the graph of a function (``tf.function``), it consists of these TensorFlow operations::

    queue     creates this operation's queue, or finds it by its name
    submit    calls Python, which submits the inputs to the core and returns a ticket; it never blocks
    wait      dequeues the tickets from the queue; TensorFlow waits without occupying a thread
    collect   calls Python, which returns the outputs or raises the error of the collective

When the core has finished a collective, :mod:`horovod.tensorflow.graph.completions` puts its ticket into the queue. So any
number of collectives may be in flight in a graph, in a different order on every rank, even if TensorFlow runs operations on a
single thread. Submit, wait and collect take the queue as an input: TensorFlow keeps operations with side effects on one
resource in order, and runs those on different resources concurrently. Python functions without a resource would run one after
the other.

The graph contains everything that the calls need (:mod:`horovod.tensorflow.graph.recorded`), and refers to no object of this
process. So it can be saved, and run in another process. What else this process knows about its own graphs, it finds by the
name of the operation or by a number: names that are counted from 0 in each generation
(:mod:`horovod.tensorflow.graph.counted_names`), and functions to call (:mod:`horovod.tensorflow.training.in_graph`).

In TensorFlow 1, nothing outside of a session can put a ticket into a queue of the session. There the wait is a loop
(:mod:`horovod.tensorflow.graph.session_loop`), and the calls are functions of this process.

Several submissions may share one wait and one collect. Buckets of gradients do, which is how they overlap with backward.
"""

from __future__ import annotations

import itertools
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.eager.context import eager_mode

from horovod.core.errors import MismatchError
from horovod.core.negotiation.agreement import MISMATCHED
from horovod.core.requests.handle import Handle
from horovod.observe import call_site
from horovod.tensorflow.device import tell_of_graphs
from horovod.tensorflow.graph import completions, counted_names, session_loop
from horovod.tensorflow.graph.callbacks import Callback
from horovod.tensorflow.graph.names import outermost
from horovod.tensorflow.graph.recorded import Collective, GraphSubmission, Outputs, decoded


class Submission(NamedTuple):
    """One collective, to be submitted to the core at once or when a graph runs.

    Attributes:
        inputs: the tensors: all of the graph that is being built, or all eager.
        collective: the collective, which submits them.
        outputs: the shapes and dtypes of the results. A dimension that depends on other ranks is None.
    """

    inputs: Sequence[Any]
    collective: Collective
    outputs: Sequence[tf.TensorSpec]


_RUNS_KEPT = 8
"""A submission that is not collected within this many runs of its graph counts as cancelled."""

_tickets = itertools.count(1)
_operation_numbers = itertools.count(1)
_process = uuid.uuid4().hex
"""Part of the names of queues. A process that loads a saved graph keeps the names, so they must be unique across processes."""

_lock = threading.RLock()  # reentrant: garbage collection may end a graph, and destroy its queue, at any moment
_in_flight: dict[str, _InFlight] = {}
"""The submissions in flight, by operation (see :class:`GraphSubmission`).

An operation has an entry only while one of its submissions is in flight."""
_queues: dict[str, Any] = {}
"""The handles of the queues that submissions have used, by name."""


class _Pending(NamedTuple):
    """A collective that is submitted and not yet collected.

    Attributes:
        handle, outputs: as :meth:`~horovod.tensorflow.graph.recorded.Collective.start` returns them.
        number: which submission of its operation it is, from 1.
        mismatch: as in :class:`~horovod.tensorflow.graph.recorded.Collective`.
    """

    handle: Handle
    outputs: Outputs
    number: int
    mismatch: str

    def wait(self) -> None:
        """Raise the error of the collective if it has failed. The collective must be done."""
        try:
            self.handle.wait()
        except MismatchError as error:
            if self.mismatch and str(error).startswith(MISMATCHED):
                raise error.extended(self.mismatch) from None
            raise


class _InFlight:
    """The submissions of one operation of a graph that are in flight, over all runs of the graph."""

    def __init__(self) -> None:
        self.submitted = 0
        self.pending: dict[int, _Pending] = {}

    def add(self, ticket: int, handle: Handle, outputs: Outputs, per_run: int, mismatch: str) -> list[int]:
        """Add a submission. Returns the tickets of old ones that nothing will collect, because another operation failed."""
        self.submitted += 1
        self.pending[ticket] = _Pending(handle, outputs, self.submitted, mismatch)
        cancelled = []
        for old, pending in self.pending.items():
            if pending.number > self.submitted - _RUNS_KEPT * per_run or not pending.handle.done():
                break
            cancelled.append(old)
        for old in cancelled:
            del self.pending[old]
        return cancelled


def build(name: str, submissions: Sequence[Submission], in_functions: bool) -> list[list[Any]]:
    """Add the operations to the graph that is being built. Returns the outputs of each submission.

    Args:
        name: the complete name of the collecting operation, not yet used in the graph.
        submissions: one or several collectives, which share one wait.
        in_functions: whether the graph is part of a function; otherwise a session runs it.
    """
    labels = [
        f"{name}_submit" if len(submissions) == 1 else f"{name}_submit_{number}" for number in range(len(submissions))
    ]
    specs = [spec for submission in submissions for spec in submission.outputs]
    types = [spec.dtype for spec in specs]
    if in_functions:
        outputs = _build_in_function(name, labels, submissions, types)
    else:
        outputs = _build_in_session(name, labels, submissions, types)
    for output, spec in zip(outputs, specs, strict=True):
        output.set_shape(spec.shape)
    found = iter(outputs)
    return [[next(found) for _ in submission.outputs] for submission in submissions]


def _build_in_function(
    name: str, labels: Sequence[str], submissions: Sequence[Submission], types: Sequence[tf.DType]
) -> list[Any]:
    operation = f"horovod_{_process}_{os.getpid()}_{next(_operation_numbers)}"
    graph = tf.compat.v1.get_default_graph()
    queue = tf.raw_ops.FIFOQueueV2(
        component_types=[tf.int64], shapes=[()], capacity=-1, shared_name=operation, name=_exactly(f"{name}_queue")
    )
    if graph.experimental_acd_manager is not None:
        # TensorFlow would run it after all earlier Python functions of the graph, which may wait for what other ranks do first.
        graph.experimental_acd_manager.run_independently(queue.op)
    weakref.finalize(outermost(graph), _destroy, operation).atexit = False
    counted_names.built(operation)
    line = _users_line(queue.op)
    tickets = []
    for label, submission in zip(labels, submissions, strict=True):
        message = GraphSubmission(operation, len(submissions), line, submission.collective).encoded()
        recorded = tf.constant(message, name=_exactly(f"{name}_recorded{label.removeprefix(f'{name}_submit')}"))
        ticket = _SUBMIT.add([queue, recorded, *submission.inputs], [tf.int64], _exactly(label))[0]
        ticket.set_shape(())
        tickets.append(ticket)
    where = tf.constant(operation, name=_exactly(f"{name}_operation"))
    with tf.control_dependencies(tickets):
        label = _exactly(f"{name}_wait")
        if len(tickets) == 1:
            arrived = tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.int64], name=label)[0]
        else:
            arrived = tf.raw_ops.QueueDequeueManyV2(
                handle=queue, n=len(tickets), component_types=[tf.int64], name=label
            )[0]
        known = [queue, where, arrived, *tickets]
    return _COLLECT.add(known, types, _exactly(name))


def _build_in_session(
    name: str, labels: Sequence[str], submissions: Sequence[Submission], types: Sequence[tf.DType]
) -> list[Any]:
    line: list[str] = []
    operation = f"session_{next(_operation_numbers)}"
    counted_names.built(operation)

    def submitter(collective: Collective) -> Callable[..., int]:
        def submit(*inputs: Any) -> int:
            ticket, handle = _submit(GraphSubmission(operation, len(submissions), line[0], collective), inputs)
            session_loop.expect(ticket, handle)
            return ticket

        return submit

    def collect(tickets: Any) -> list[Any]:
        numbers = [-ticket for ticket in _numbers(tickets)]
        for number in numbers:
            session_loop.forget(number)
        return _outputs(_taken(operation, numbers))

    tickets = []
    for label, submission in zip(labels, submissions, strict=True):
        ticket = tf.py_function(submitter(submission.collective), submission.inputs, tf.int64, _exactly(label))
        ticket.set_shape(())
        tickets.append(ticket)
    line.append(_users_line(tickets[0].op))
    found: list[Any] = tf.py_function(
        collect, [session_loop.wait(tickets, _exactly(f"{name}_wait"))], types, _exactly(name)
    )
    return found


# The functions from here to _catch_up() run when the graph runs, on TensorFlow's threads.


def _submit(recorded: GraphSubmission, inputs: Sequence[Any]) -> tuple[int, Handle]:
    """Submit a collective. Returns its ticket and its handle."""
    tell_of_graphs()
    with call_site.on_behalf_of(recorded.line):
        collective = counted_names.present(recorded.operation, recorded.collective)
        handle, outputs = collective.start(inputs, False)
    ticket = next(_tickets)
    with _lock:
        in_flight = _in_flight.get(recorded.operation)
        if in_flight is None:
            in_flight = _in_flight[recorded.operation] = _InFlight()
        cancelled = in_flight.add(ticket, handle, outputs, recorded.per_run, recorded.collective.mismatch)
    for old in cancelled:
        session_loop.forget(old)
    return ticket, handle


def _submit_recorded(queue: Any, message: Any, *inputs: Any) -> Any:
    recorded = decoded(message.numpy())
    _queues[recorded.operation] = queue
    ticket, handle = _submit(recorded, inputs)
    completions.start()
    handle.then(lambda: completions.complete(queue, ticket))
    return tf.constant(ticket, tf.int64)


def _collect_recorded(queue: Any, where: Any, arrived: Any, *tickets: Any) -> list[Any]:
    operation, numbers = where.numpy().decode(), [int(ticket) for ticket in tickets]
    pendings = _taken(operation, numbers)
    if set(_numbers(arrived)) != set(numbers):
        _catch_up(operation, queue, pendings)
    return _outputs(pendings)


def _taken(operation: str, numbers: Sequence[int]) -> list[_Pending]:
    with _lock:
        in_flight = _in_flight[operation]
        pendings = [in_flight.pending.pop(number) for number in numbers]
        if not in_flight.pending:
            del _in_flight[operation]
    return pendings


def _outputs(pendings: Sequence[_Pending]) -> list[Any]:
    for pending in pendings:
        pending.wait()
    return [output for pending in pendings for output in pending.outputs()]


def _catch_up(operation: str, queue: Any, pendings: Sequence[_Pending]) -> None:
    """Wait for ``pendings`` here, and clear the queue: the tickets in it are left over from a run that was cancelled."""
    for pending in pendings:
        try:
            pending.handle.wait()
        except Exception:
            pass  # _outputs() raises it
    with _lock:
        left = 0 if operation in _in_flight else int(tf.raw_ops.QueueSizeV2(handle=queue))
        if left:
            tf.raw_ops.QueueDequeueManyV2(handle=queue, n=left, component_types=[tf.int64])


def _destroy(operation: str) -> None:
    """Discard the submissions that a graph has not collected, and destroy its queue. Called when the graph no longer exists.

    A copy of the graph, loaded from a file, creates the queue again. While collectives of a copy run, nothing is destroyed.
    """
    with _lock:
        in_flight = _in_flight.get(operation)
        if in_flight is not None and not all(pending.handle.done() for pending in in_flight.pending.values()):
            return
        _in_flight.pop(operation, None)
        queue = _queues.pop(operation, None)
        if queue is None:
            return
        with eager_mode():
            tf.raw_ops.DestroyResourceOp(resource=queue, ignore_lookup_error=True)


_SUBMIT = Callback("HorovodSubmit", _submit_recorded)
_COLLECT = Callback("HorovodCollect", _collect_recorded)


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
