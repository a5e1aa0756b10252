"""What this rank waits for, for rank 0's proof of a deadlock (:mod:`horovod.observe.deadlock`).

A rank has a standing only if nothing in its process can continue by itself: every thread waits for a collective without a time
limit, or is known to wait. A thread that computes, sleeps, reads, or is inside a framework may submit something later, so the
rank has none then. The proof ends a job, so where this is not certain there is no standing, or a doubtful one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from horovod.core.negotiation.agreement import describe
from horovod.core.negotiation.messages import Operation
from horovod.core.requests.batch import Entry
from horovod.core.requests.handle import Handle, waiting
from horovod.core.worker.worker import WorkerThread
from horovod.observe import threads
from horovod.observe.deadlock import Expected, Standing, Submitted
from horovod.observe.threads import ThreadState

MOST_THREADS = 90
"""With more threads, a list of stacks may be incomplete."""


@dataclass(frozen=True)
class Messages:
    """The messages between this rank and others that are not done.

    Attributes:
        pending: each with its handle, as in :class:`~horovod.observe.deadlock.Expected`: the ranks, and a description.
        sent, arrived, unconnected: as in :class:`~horovod.observe.deadlock.Standing`.
    """

    pending: Sequence[tuple[Handle, tuple[int, ...], str]]
    sent: Mapping[int, int]
    arrived: Mapping[int, int]
    unconnected: Collection[int] = ()


class StandingReporter:
    """Makes the standing of this rank. For one thread.

    Args:
        size: the number of ranks of the job.
        workers: by process set id.
        messages: returns the messages of each part of the runtime that has some, None for one that may continue by itself.
        states: returns the threads of this process.
    """

    def __init__(
        self,
        size: int,
        workers: Mapping[int, WorkerThread],
        messages: Callable[[], Sequence[Messages | None]] = list,
        states: Callable[[], list[ThreadState]] = threads.states,
    ) -> None:
        self._size = size
        self._workers = workers
        self._messages = messages
        self._states = states
        self._progress = 0
        self._before: object = None

    def standing(self) -> Standing | None:
        """The standing; None if this rank may continue by itself."""
        found = self._look()
        if found is None:
            self._before = None
            return None
        standing, identity = found
        if identity != self._before:
            self._progress += 1
            self._before = identity  # also keeps the handles alive, so that no other one gets their address
        return Standing(self._progress, *[getattr(standing, name) for name in Standing.__struct_fields__[1:]])

    def _look(self) -> tuple[Standing, object] | None:
        sleeping = dict(waiting)
        if not sleeping or any(handle.done() for handle, _ in sleeping.values()):
            return None
        workers = list(self._workers.items())
        if any(worker.executor.runs for _, worker in workers):
            return None
        entries = [(number, worker, worker.entries()) for number, worker in workers]
        if any(entry.held for _, _, found in entries for entry in found):  # it waits for a device
            return None
        parts = []
        for part in self._messages():
            if part is None:
                return None
            parts.append(part)
        messages = [each for part in parts for each in part.pending]
        known = {id(entry.handle) for _, _, found in entries for entry in found} | {id(each) for each, _, _ in messages}
        if any(id(handle) not in known for handle, _ in sleeping.values()):
            return None
        states = self._states()
        if len(states) > MOST_THREADS or any(_continues(each, sleeping) for each in states):
            return None
        awaited = {id(handle) for handle, _ in sleeping.values()}
        submitted = [
            self._submitted(number, worker, entry, id(entry.handle) in awaited)
            for number, worker, found in entries
            for entry in found
        ]
        expected = [Expected(ranks, view, id(handle) in awaited) for handle, ranks, view in messages]
        sent = {rank: count for part in parts for rank, count in part.sent.items()}
        arrived = {rank: count for part in parts for rank, count in part.arrived.items()}
        since = max(begin for _, begin in sleeping.values())
        orders = {number: worker.executor.begun for number, worker in workers}
        unconnected = sorted({rank for part in parts for rank in part.unconnected})
        doubtful = [_line(each) for each in states if _is_doubtful(each, sleeping)]
        handles = [(thread, _Same(handle), begin) for thread, (handle, begin) in sorted(sleeping.items())]
        latest = [(number, _Same(worker.latest())) for number, worker in workers]
        pending = [_Same(handle) for handle, _, _ in messages]
        idents = sorted(each.ident for each in states)
        identity = handles, latest, pending, sent, arrived, idents, orders, doubtful, unconnected, len(parts)
        idle = time.monotonic() - since
        listens = bool(parts)
        return (
            Standing(0, idle, orders, submitted, expected, sent, arrived, doubtful, unconnected, listens),
            identity,
        )

    def _submitted(self, number: int, worker: WorkerThread, entry: Entry, awaited: bool) -> Submitted:
        request = entry.request
        ranks = request.members or tuple(worker.ranks)
        return Submitted(
            number,
            request.name,
            () if len(ranks) == self._size else ranks,
            not request.members,
            request.operation is Operation.JOIN,
            describe(request) if awaited else "",
            awaited,
        )


class _Same:
    """Equal for the same object only. Refers to it."""

    def __init__(self, found: Any) -> None:
        self._found = found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._found is other._found

    __hash__ = None  # type: ignore[assignment]  # compared only


def _continues(state: ThreadState, sleeping: Mapping[int, object]) -> bool:
    """Whether a thread may submit something. The main thread may unless it waits, and one of the runtime inside a callback."""
    if state.ident in sleeping:
        return False
    if state.own:
        return any(frame.users for frame in state.frames)
    return state.main and not threads.is_parked(state)


def _is_doubtful(state: ThreadState, sleeping: Mapping[int, object]) -> bool:
    """Whether it is not known if a thread waits. The main thread of a script counts as parked only if it waits itself."""
    if state.ident in sleeping or state.own:
        return False
    return state.main or not threads.is_parked(state)


def _line(state: ThreadState) -> str:
    location = state.location
    where = "" if location is None else f" at {location.file}:{location.line} in {location.function}"
    return f"thread {state.name}{where}"
