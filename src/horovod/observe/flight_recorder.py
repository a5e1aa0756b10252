"""The flight recorder: each process set keeps its last collectives on this rank, with the time of each of their stages.

It is always on, so an entry costs well under a microsecond: one small object in a ring of fixed length, no lock of its own and
no formatting. An entry refers to the request, which exists anyway. :mod:`horovod.core.lifecycle.dumping` writes the ring to a
file when something is wrong.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any

import msgspec

MOST_NAMES = 1 << 16
"""How many names are counted before counting starts again: a script that never repeats a name must not fill the memory."""


class Record(msgspec.Struct, eq=False, gc=False):
    """One collective, from its submission on this rank. All times are of ``time.monotonic``; 0: not yet.

    Attributes:
        request: the submitted request, with the user's line (``core.negotiation.messages.Request``).
        number: the position among this rank's submissions on this process set, from 1.
        occurrence: the position among the submissions of this name, from 1.
        awaited: when a thread of the script began to wait for the handle.
        agreed: when this rank heard that all ranks have submitted it.
        started, ended: when this rank began to carry it out, and when its handle was completed.
        order: the position among the collectives that the process set carries out, from 1, the same on all ranks; 0: not yet.
        engine: the engine that carried it out.
        error: why it failed; "" if it has not.
    """

    request: Any
    number: int
    occurrence: int
    submitted: float
    agreed: float = 0.0
    started: float = 0.0
    ended: float = 0.0
    order: int = 0
    engine: str = ""
    error: str = ""
    awaited: float = 0.0

    def fail(self, error: BaseException) -> None:
        """Record that the handle is completed with an error."""
        self.error = str(error) or type(error).__name__


class ReportTimer:
    """Has the first submission after a progress report is due start it, on whatever process set.

    Attributes:
        due: when, by ``time.monotonic``; infinity: not yet known.
    """

    __slots__ = ("_start", "due")

    def __init__(self) -> None:
        self.due = math.inf
        self._start: Callable[[], None] = lambda: None

    def set(self, due: float, start: Callable[[], None]) -> None:
        """Have ``start`` called once from ``due`` on, under the lock of the requests in flight."""
        self._start = start
        self.due = due

    def start(self) -> None:
        """A submission has come after :attr:`due`."""
        self.due = math.inf
        self._start()


class FlightRecorder:
    """The last collectives of one process set on this rank.

    :meth:`submitted` is called under the lock of the requests in flight, the others by the thread that drives the worker. Any
    thread may read :attr:`ring`: copying it is one step.

    Args:
        size: the number of records that are kept.
        reports: called at the first submission after a report is due; None: reports are not made.

    Attributes:
        ring: the records, oldest first.
        count: the number of collectives that were submitted.
        carried_out: the number of collectives that the process set has carried out.
    """

    __slots__ = ("_occurrences", "_reports", "carried_out", "count", "ring")

    def __init__(self, size: int, reports: ReportTimer | None = None) -> None:
        self.ring: deque[Record] = deque(maxlen=size)
        self.count = 0
        self.carried_out = 0
        self._reports = reports or ReportTimer()
        self._occurrences: dict[str, int] = {}

    def submitted(self, request: Any, now: float) -> Record:
        """Record a submission. Returns the record, which its handle keeps."""
        name = request.name
        occurrence = 1
        if not request.transient:
            occurrences = self._occurrences
            before = occurrences.get(name)
            if before is not None:
                occurrence = before + 1
            elif len(occurrences) >= MOST_NAMES:
                occurrences.clear()
            occurrences[name] = occurrence
        number = self.count = self.count + 1
        record = Record(request, number, occurrence, now)
        self.ring.append(record)
        if now >= self._reports.due:
            self._reports.start()
        return record

    def begins(self, batch: Iterable[tuple[object, Any]], engine: str, agreed: float) -> None:
        """Record that the process set carries these out together, in this order.

        Args:
            batch: the batch of the executor (``core.requests.batch.Batch``).
        """
        now = monotonic()
        order = self.carried_out
        for _, entry in batch:
            order += 1
            if entry is not None and (record := entry.handle.record) is not None:
                record.order = order
                record.agreed = agreed
                record.started = now
                record.engine = engine
        self.carried_out = order

    def ran(self, record: Record | None, engine: str, started: float) -> None:
        """Record that the process set has carried out one collective without an order of the coordinator."""
        order = self.carried_out = self.carried_out + 1
        if record is not None:
            record.order = order
            record.agreed = record.started = started
            record.engine = engine
