"""Sends this rank's progress to rank 0 every few seconds. On rank 0: logs which rank delays the others, and writes the
timeline of all ranks.

A submission that comes when a report is due has the thread of the flight recorder make one, from what the recorder and the
clock of the steps know (:mod:`horovod.observe.progress`). It travels on the connection of the liveness monitor. So the thread
that trains only compares two numbers, and a rank that submits nothing sends nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from horovod.core.lifecycle.process_set import membership
from horovod.core.lifecycle.recording import Recording
from horovod.core.worker.worker import WorkerThread
from horovod.observe import host_system
from horovod.observe.all_ranks import PartMaker, TimelinePart
from horovod.observe.flight_recorder import ReportTimer
from horovod.observe.live import JobSnapshot, LiveJob
from horovod.observe.progress import ProgressMeter, StepProgress
from horovod.observe.step_clock import clock
from horovod.observe.stragglers import StragglerWatch, describe

_log = logging.getLogger("horovod.core")

_SECONDS = 2.0
"""How often a rank reports."""
_TIMELINE_SECONDS = 0.5
"""The same where there is a timeline of all ranks."""
_FINISH_SECONDS = 5.0
"""How long the end of a generation waits for the last report."""
_REPORTS_PER_SECOND = 200
"""How many reports rank 0 gets, at most. Ranks of larger jobs report less often."""

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(StepProgress | TimelinePart)


class ProgressReports:
    """The progress reports of one generation on one rank. All methods are for the thread that ``post`` uses.

    Args:
        hosts: by rank.
        workers: by process set id.
        least_share: the smallest share of the time by which a rank must delay the others to be named; 0: never name one.
        recoveries: the number of earlier generations.
        lost: the ranks that an elastic job has gone on without.
        recording: gets the parts of the timeline of all ranks.
        timer: starts reports.
        post: calls a function on that thread.
        send: sends a report to rank 0; called on every other rank.
    """

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        workers: Mapping[int, WorkerThread],
        least_share: float,
        recoveries: int,
        lost: Sequence[str],
        recording: Recording,
        timer: ReportTimer,
        post: Callable[[Callable[[], None]], None],
        send: Callable[[bytes], None],
    ) -> None:
        self._rank = rank
        self._hosts = hosts
        self._workers = workers
        self._post = post
        self._send = send
        self._recording = recording
        seconds = _TIMELINE_SECONDS if recording.of_all_ranks else _SECONDS
        self._period = max(seconds, len(hosts) / _REPORTS_PER_SECOND)
        self._parts = PartMaker(host_system.boot_id()) if recording.of_all_ranks else None
        self._last = time.monotonic()
        self._meter = ProgressMeter(clock, self._last)
        self._watch = StragglerWatch(least_share)
        self._live = LiveJob(hosts, self._last, recoveries, lost)
        self._lock = threading.Lock()  # guards the state of the job, which the live view reads
        self._timer = timer
        self._set_timer()

    def _set_timer(self) -> None:
        self._timer.set(self._last + self._period, lambda: self._post(self._report))

    def take(self, rank: int, body: bytes, received: float) -> None:
        """On rank 0: take the report of a rank.

        Args:
            received: when the report was received.

        Raises:
            msgspec.DecodeError: the message is not a report.
        """
        self._add(rank, _decoder.decode(body), received)

    def finish(self) -> None:
        """Send the rest of the timeline of all ranks within some seconds. For any other thread."""
        if self._parts is None:
            return
        sent = threading.Event()

        def send() -> None:
            self._send_now(time.monotonic())
            sent.set()

        self._post(send)
        sent.wait(_FINISH_SECONDS)

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._last >= self._period:
            self._send_now(now)
        self._set_timer()

    def _send_now(self, now: float) -> None:
        self._last = now
        workers = list(self._workers.items())
        rings = {number: worker.recorder for number, worker in workers if worker.recorder is not None}
        spans = clock.taken()
        reports: list[StepProgress | TimelinePart] = [self._meter.take(rings, spans, now)]
        if self._parts is not None:
            reports.append(self._parts.make(rings, spans, now))
        for each in reports:
            if self._rank == 0:
                self._add(0, each, now)
            else:
                self._send(_encode(each))

    def _add(self, rank: int, report: StepProgress | TimelinePart, received: float) -> None:
        if isinstance(report, TimelinePart):
            self._recording.add(rank, report, received)
            return
        with self._lock:
            self._live.add(rank, report, time.monotonic())
        self._watch.add(rank, report)
        for found in self._watch.found(dict(membership.ranks), time.monotonic()):
            text = describe(found, self._hosts[found.rank])
            _log.warning("%s", text)
            with self._lock:
                self._live.straggler = text

    # On rank 0, for any thread.

    def snapshot(self, lines: Mapping[int, str], awaited: Mapping[int, Sequence[str]]) -> JobSnapshot:
        """As :meth:`~horovod.observe.live.LiveJob.snapshot`."""
        with self._lock:
            return self._live.snapshot(time.monotonic(), lines, awaited)

    def metrics(self) -> str:
        """The state of the job in Prometheus's text format."""
        with self._lock:
            return self._live.metrics(time.monotonic())
