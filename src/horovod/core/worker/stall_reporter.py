"""Reports requests that some ranks of a process set have announced and others have not, for its coordinator."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Sequence

from horovod._base.config import Config
from horovod._base.running_time import TURN_SECONDS, running_time
from horovod.control.failure import Cause, FailureKind
from horovod.control.processes import STOPPED, why_not_running
from horovod.core.negotiation.agreement import describe, list_ranks
from horovod.core.negotiation.negotiator import Negotiator
from horovod.core.worker.role import Watch
from horovod.observe.stall import Stalled, StallInspector, describe_different_names

_log = logging.getLogger("horovod.core")

_HINT_SECONDS = 1.0
"""Time without an announcement after which to check whether ranks wait for different names."""
_TIME_TO_ANSWER = 0.2
"""Seconds between asking the ranks for their lines and reporting a stall. A rank that has not answered is reported without its
line."""


class StallReporter:
    """The stalls of one process set. All methods are for the thread that drives the coordinator.

    Args:
        ranks: the members' global ranks, in set order.
        negotiator: knows the announcements.
        watch: asks ranks for their lines, and ends the job after the limit.
    """

    def __init__(self, ranks: Sequence[int], negotiator: Negotiator, config: Config, watch: Watch) -> None:
        self._ranks = ranks
        self._negotiator = negotiator
        self._enabled = config.stall_check
        self._watch = watch
        self._warning_seconds = config.stall_warning_time.total_seconds()
        self._limit_seconds = config.stall_limit.total_seconds()
        self._inspector = StallInspector(self._warning_seconds, self._limit_seconds)
        if config.stall_check and config.stall_shutdown_time > config.stall_limit:
            _log.warning(
                "the stall shutdown time (%s) is shorter than the warning time (%s), so it is off",
                config.stall_shutdown_time,
                config.stall_warning_time,
            )
        self._turn_seconds = min(TURN_SECONDS, (self._limit_seconds or math.inf) / 4)
        self._looked_at_launcher = 0.0
        self._planned = math.inf
        self._looked = 0.0
        self._next_inspection = 0.0
        self._asked_where = False
        # The state of announcements that was looked at, and asked about, last.
        self._looked_at = self._asked_about = 0.0

    def pause(self) -> None:
        """The next look has no planned time: the coordinator has something else to do before."""
        self._planned, self._looked = math.inf, time.monotonic()

    def milliseconds(self) -> float | None:
        """Look whether anything must be reported. Returns the time until the next look; None: there is nothing to look at."""
        planned, self._planned = self._planned, math.inf
        oldest = self._negotiator.oldest() if self._enabled else None
        if oldest is None:
            return None
        now = time.monotonic()
        # A look without a planned time comes at once, when the messages at hand are handled: what has been incomplete for
        # longer without a look was so while this process was stopped, whatever came first after that.
        running_time.turn(max(oldest, self._looked) if planned == math.inf else planned, now)
        self._looked = now
        self._look_at_launcher(now)
        hint = self._look_whether_apart(now)
        due = max(now + self._warning_seconds - running_time.age(oldest, now), self._next_inspection)
        if now >= due and not self._asked_where:
            self._watch.probe()  # so that the report can say where the missing ranks are
            self._asked_where = True
            due = self._next_inspection = now + _TIME_TO_ANSWER
        elif now >= due:
            self._asked_where = False
            due = self._next_inspection = now + max(1.0, self._inspect(now))
        self._planned = max(now, min(due, hint, now + self._turn_seconds))
        return max(1.0, (self._planned - now) * 1000)

    def _look_at_launcher(self, now: float) -> None:
        """While the process that started this one is stopped, a rank may wait in writing its output: that is no stall."""
        since, self._looked_at_launcher = self._looked_at_launcher, now
        if now - since < self._turn_seconds / 2:
            self._looked_at_launcher = since
        elif why_not_running(os.getppid()) == STOPPED:
            running_time.leave_out(max(since, now - 2 * self._turn_seconds), now)

    def _look_whether_apart(self, now: float) -> float:
        """Report at once if ranks wait for different names, which can then never complete. Returns the time of the next
        check."""
        state = self._negotiator.moved
        if state == self._looked_at:
            return math.inf
        if now < state + _HINT_SECONDS:
            return state + _HINT_SECONDS
        apart = self._negotiator.apart()
        if apart and state != self._asked_about:
            self._watch.probe()
            self._asked_about = state
            return now + _TIME_TO_ANSWER
        self._looked_at = state
        awaited = self._watch.awaited
        if apart and all(set(awaited.get(rank, ())) & {each.request.name for each in apart} for rank in self._ranks):
            by_rank = [(each.announced, each.request.name, describe(each.request)) for each in apart]
            _log.warning("%s", describe_different_names(by_rank))
            self._watch.request_dump("stall", "ranks wait for different collectives")
        return math.inf

    def _inspect(self, now: float) -> float:
        """Report stalls. Returns the seconds until the next inspection."""
        stalled = [
            Stalled(
                waiting.request.name,
                describe(waiting.request),
                now - running_time.age(waiting.since, now),
                waiting.announced,
                waiting.missing,
            )
            for waiting in self._negotiator.waiting()
        ]
        text, blamed = self._inspector.report(stalled, now, self._watch.call_sites, self._watch.thread_lines)
        if text:
            _log.log(logging.ERROR if blamed >= 0 else logging.WARNING, "%s", text)
        if text and blamed < 0:  # else the failure makes the ranks write
            self._watch.request_dump("stall", f"{stalled[0].name} waits for {list_ranks(stalled[0].missing)}")
        if blamed >= 0:
            late = stalled[0]
            call_sites = {rank: line for rank, line in self._watch.call_sites.items() if rank in late.missing}
            self._watch.report(blamed, text, cause=Cause(FailureKind.TIME_LIMIT, late.name, call_sites))
        remaining = [self._warning_seconds]
        if self._limit_seconds:
            remaining.append(self._limit_seconds - (now - stalled[0].since))
        return min(remaining)
