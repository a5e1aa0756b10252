"""The worker thread of a process set's first member, which decides for all: counts announcements, orders batches,
reports stalls."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from horovod.core.coordination.agreement import describe
from horovod.core.coordination.fusion import fuse
from horovod.core.coordination.messages import (
    Leave,
    Listener,
    MessageError,
    Operation,
    Order,
    Request,
    Stop,
    Succeeded,
    decode_from_member,
    encode,
)
from horovod.core.coordination.negotiator import Negotiator, ReadyRequest
from horovod.core.execution.batch import Batch
from horovod.core.execution.worker import WorkerThread
from horovod.core.submission.devices import moves
from horovod.observe.activities import activity
from horovod.observe.stall import Stalled, StallInspector
from horovod.observe.timeline import TensorLabel, Timeline

_log = logging.getLogger("horovod.core")

_TIME_TO_ANSWER = 0.2
"""Seconds between asking ranks where they are and reporting a stall; who has not answered by then is shown without."""


def labels(request: Request) -> list[TensorLabel]:
    """A request's tensors as the timeline shows them; its own name where it has none."""
    found = [TensorLabel(each.name, each.data_type.label, each.shape) for each in request.tensors]
    return found or [TensorLabel(request.name, "", ())]


class CoordinatorThread(WorkerThread):
    """The worker thread of the set's first member, which decides for all."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]  # the signature is Lane's
        self._negotiator = Negotiator(self.ranks, self._config.cache_capacity)
        self._listeners = {member: Listener(self._config.cache_capacity) for member in self._connections.members()}
        self._window = self._config.cycle_time.total_seconds()
        self._window_end = 0.0
        self._inspector = StallInspector(
            self._config.stall_warning_time.total_seconds(), self._config.stall_limit.total_seconds()
        )
        if self._config.stall_check and self._config.stall_shutdown_time > self._config.stall_limit:
            _log.warning(
                "the stall shutdown time (%s) is shorter than the warning time (%s), so it is off",
                self._config.stall_shutdown_time,
                self._config.stall_warning_time,
            )
        self._next_inspection = 0.0
        self._asked_where = False
        self.timeline: Timeline | None = None
        """Another thread starts and stops it at any moment, so whoever uses it reads this once."""

    def _announce(self, requests: list[Request]) -> None:
        if self._proposals is not None:
            self._proposals.shut()
        self._count(0, requests)

    def _count(self, member: int, requests: Sequence[Request]) -> None:
        timeline = self.timeline
        if timeline is not None:
            for request in requests:
                if request.operation != Operation.JOIN:
                    timeline.ready(request.operation.name, labels(request), member)
        self._negotiator.announce(member, requests, time.monotonic())

    def _say_leave(self, reason: str) -> None:
        self._stopping = self._stopping or (self.ranks[0], reason)

    def _receive(self, member: int, body: bytes) -> None:
        message = decode_from_member(body)
        if isinstance(message, Leave):
            self._stopping = self._stopping or (self.ranks[member], message.reason)
            return
        listener = self._listeners[member]
        requests = listener.requests(message.items)
        if message.proposal and self._had_succeeded(message.proposal):
            self._connections.send(member, encode(Succeeded()))
            del requests[:1]
        self._count(member, requests)
        if self._proposals is not None and not self._fast_path_open():
            self._proposals.shut()  # who has announced something, or joined, makes no offer

    def _had_succeeded(self, proposal: int) -> bool:
        if self._proposals is None:
            raise MessageError("there are no attempts without shared memory")
        try:
            return self._proposals.give_up(proposal)
        except ValueError as error:
            raise MessageError(str(error)) from error

    def _fast_path_open(self) -> bool:
        return self._negotiator.idle and self.timeline is None

    def _at_rest(self) -> None:
        if self._proposals is not None and self._fast_path_open():
            self._proposals.reopen()

    def _milliseconds(self) -> float | None:
        if self._negotiator.has_ready:  # inside a gathering window
            return max(0.0, (self._window_end - time.monotonic()) * 1000)
        limit = super()._milliseconds()
        if not self._config.stall_check:
            return limit
        oldest = self._negotiator.oldest()
        if oldest is None:
            return limit
        now = time.monotonic()
        due = max(oldest + self._config.stall_warning_time.total_seconds(), self._next_inspection)
        if now >= due and not self._asked_where:
            self._watch.probe()  # so that the report can say where the missing ranks are
            self._asked_where = True
            due = self._next_inspection = now + _TIME_TO_ANSWER
        elif now >= due:
            self._asked_where = False
            due = self._next_inspection = now + max(1.0, self._inspect(now))
        until = max(1.0, (due - now) * 1000)
        return until if limit is None else min(limit, until)

    def _inspect(self, now: float) -> float:
        """Report stalls; returns the seconds until the next look."""
        stalled = [
            Stalled(waiting.request.name, describe(waiting.request), waiting.since, waiting.announced, waiting.missing)
            for waiting in self._negotiator.waiting()
        ]
        text, guilty = self._inspector.report(stalled, now, self._watch.call_sites)
        if text:
            _log.log(logging.ERROR if guilty >= 0 else logging.WARNING, "%s", text)
        if guilty >= 0:
            self._watch.report(guilty, text)
        remaining = [self._config.stall_warning_time.total_seconds()]
        if self._config.stall_limit:
            remaining.append(self._config.stall_limit.total_seconds() - (now - stalled[0].since))
        return min(remaining)

    def _decide(self) -> None:
        if self._negotiator.has_ready and not self._gathering():
            ready = self._negotiator.take()
            batches = fuse(ready, self._config.fusion_threshold, self._config.disable_group_fusion)
            timeline = self.timeline
            if timeline is not None:
                timeline.cycle()
            self._order(batches)
            self._due.extend([[item.decision for item in batch] for batch in batches])

    def _execute(self, batch: Batch) -> None:
        timeline = self.timeline
        if timeline is None:
            self._run_batch(batch)
        else:
            self._run_recorded(timeline, batch)

    def _before_stop(self, rank: int, reason: str) -> None:
        body = encode(Stop(rank, reason))
        for member in self._connections.members():
            self._connections.send(member, body)
        self._connections.flush_all(self._probe_seconds)

    def _gathering(self) -> bool:
        """Whether to wait for more: inside the window that begins with the first decision, if there is one."""
        if not self._window or self._stopping is not None:
            return False
        now = time.monotonic()
        if not self._window_end:
            self._window_end = now + self._window
        if now < self._window_end:
            return True
        self._window_end = 0.0
        return False

    def _run_recorded(self, timeline: Timeline, batch: Batch) -> None:
        """Run a batch with its tensors in the timeline."""
        first = batch[0][0]
        operation = first.operation.name
        tensors = []
        for decision, entry in batch:
            request = decision.template if entry is None else entry.request
            tensors += labels(request) if request is not None else []
        timeline.decided(tensors)
        shown = not first.error and first.operation not in (Operation.BARRIER, Operation.JOIN)
        if not shown:
            self._run_batch(batch)
            return
        engine = self.communicator.name
        if self.devices is not None and moves(first.device, self.devices.engine):
            engine = self.devices.engine
        timeline.begin(operation, activity(engine, operation), engine, tensors)
        try:
            self._run_batch(batch)
        finally:
            timeline.end(tensors)

    def _order(self, batches: list[list[ReadyRequest]]) -> None:
        members = self._connections.members()
        if not members:
            return
        body = encode(
            Order([[item.decision if item.fresh else item.decision.identifier for item in batch] for batch in batches])
        )
        for member in members:
            self._connections.send(member, body)
