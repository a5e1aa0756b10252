"""The progress of one rank in an interval: its steps, and the time in each phase of them. Pure.

The numbers come from data that exists anyway: the records of the flight recorder and the clock of the steps. They are evaluated
every few seconds, beside the training.

A rank is *blocked* from the moment in which its script waits for a handle. While the collective is not carried out yet, because
other ranks have not submitted it, the rank *waits*. For the rest of the blocked time it *communicates*. A framework that waits
by itself does not report that moment. A rank then counts as blocked by the collectives that it has submitted outside of
backward, except while it submits more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from horovod.observe.flight_recorder import Record
from horovod.observe.step_clock import BACKWARD, DATA, FORWARD, REDUCTION, UPDATE, PhaseSpan, StepClock

Span = tuple[float, float]
"""An interval: begin and end, in seconds."""

PHASES = ("data loading", "forward", "backward", "the update", "its own work")
"""The phases in which a rank computes; the last is used if no optimizer reports phases."""
_OWN_WORK = len(PHASES) - 1
_NAMES_SEEN = 4096
_LONE_RECORDS = 200
"""The number of collectives without the name by which steps are counted, after which another name is chosen."""


class StepProgress(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """The progress of a rank in an interval. It is sent to rank 0.

    Attributes:
        seconds: the length of the interval.
        steps: those of an optimizer, or the recurrences of a name.
        samples: the number of samples that the data loader has delivered; 0: not known.
        phases: the seconds in each of :data:`PHASES`.
        communication, waiting: the seconds of communicating and of waiting.
        waiting_by_set: the seconds of waiting for collectives of each process set.
        collectives, bytes: the number of collectives that have ended, and the size of their inputs on this rank.
        awaited, line: the name of the collective that it has waited for most, and the script's line.
    """

    seconds: float
    steps: int
    samples: int
    phases: list[float]
    communication: float
    waiting: float
    waiting_by_set: dict[int, float]
    collectives: int
    bytes: int
    awaited: str = ""
    line: str = ""


class Ring(Protocol):
    """The records of a process set (:class:`horovod.observe.flight_recorder.FlightRecorder`)."""

    @property
    def ring(self) -> Any: ...


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time, without overlaps, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if end <= begin:
            continue
        if found and begin <= found[-1][1]:
            if end > found[-1][1]:
                found[-1] = found[-1][0], end
        else:
            found.append((begin, end))
    return found


def overlap(one: Sequence[Span], two: Sequence[Span]) -> float:
    """The seconds that two lists have in common. Each is in order and without overlaps."""
    total, i, j = 0.0, 0, 0
    while i < len(one) and j < len(two):
        total += max(0.0, min(one[i][1], two[j][1]) - max(one[i][0], two[j][0]))
        if one[i][1] < two[j][1]:
            i += 1
        else:
            j += 1
    return total


def length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


class ProgressMeter:
    """Measures the progress of one rank from one call of :meth:`take` to the next. Called by one thread.

    Args:
        now: when the first interval begins.
    """

    def __init__(self, clock: StepClock, now: float) -> None:
        self._clock = clock
        self._since = now
        self._totals = self._present(now)
        self._steps, self._samples = clock.steps, clock.samples
        self._first: dict[int, int] = {}  # by process set, the number of the first record that had not ended
        self._latest: dict[int, int] = {}  # by process set, the number of the last record that was seen
        self._anchor = ""
        self._seen: set[str] = set()
        self._lone = 0
        self._trains = False  # whether an optimizer has made a step

    def take(self, rings: Mapping[int, Ring], spans: Iterable[PhaseSpan], now: float) -> StepProgress:
        """The progress since the last call.

        Args:
            rings: by process set.
            spans: the phases that have ended since the last call.
        """
        over: dict[int, list[Span]] = {REDUCTION: self._open(REDUCTION, now), BACKWARD: self._open(BACKWARD, now)}
        for phase, begin, end in spans:
            over.setdefault(phase, []).append((begin, end))
        since, self._since = self._since, now
        reductions = merged((max(since, begin), end) for begin, end in over[REDUCTION])
        backwards = merged(over[BACKWARD])
        in_flight: dict[int, list[Span]] = {}
        running: dict[int, list[Span]] = {}
        waits: dict[tuple[str, str], float] = {}
        ended = size = recurrences = 0
        standing = list(reductions)
        unawaited: list[Span] = []
        for number, each in rings.items():
            records = self._records(number, each)
            lived = [(max(since, one.submitted), min(now, one.ended or now)) for one in records]
            in_flight[number] = merged(lived)
            running[number] = merged(
                (max(since, one.started), min(now, one.ended or now)) for one in records if one.started
            )
            for one, (begin, end) in zip(records, lived, strict=True):
                if one.awaited:
                    standing.append((max(begin, one.awaited), end))
                elif not _inside(one.submitted, backwards):
                    unawaited.append((begin, end))
            for one in records:
                waits_until = min(now, one.started or one.ended or now)
                key = one.request.name, one.request.caller
                waits[key] = waits.get(key, 0.0) + max(0.0, waits_until - max(since, one.submitted))
                if one.ended and one.ended > since:
                    ended += 1
                    size += one.request.nbytes
            recurrences += self._recurrences(number, records)
        totals, before = self._present(now), self._totals
        self._totals = totals
        spent = [max(0.0, new - old) for new, old in zip(totals, before, strict=True)]
        steps, self._steps = self._clock.steps - self._steps, self._clock.steps
        samples, self._samples = self._clock.samples - self._samples, self._clock.samples
        submissions = sorted(begin for begin, _ in unawaited)
        standing += [(submissions[bisect_right(submissions, end) - 1], end) for begin, end in unawaited if begin < end]
        standing = merged(standing)
        all_running = merged(span for spans in running.values() for span in spans)
        all_in_flight = merged(span for spans in in_flight.values() for span in spans)
        waiting = overlap(standing, all_in_flight) - overlap(standing, all_running)
        by_set = {
            number: overlap(standing, spans) - overlap(standing, running[number]) for number, spans in in_flight.items()
        }
        phases = [0.0] * len(PHASES)
        phases[0] = spent[DATA]
        trains = self._trains = self._trains or steps > 0
        if trains:
            beside = length(standing) - length(reductions)  # in collectives of the script's own
            phases[1], phases[2], phases[3] = max(0.0, spent[FORWARD] - beside), spent[BACKWARD], spent[UPDATE]
        else:
            phases[_OWN_WORK] = max(0.0, now - since - length(standing) - spent[DATA])
        name, line = max(waits, key=lambda key: waits[key]) if waits else ("", "")
        return StepProgress(
            now - since,
            steps if trains else recurrences,
            samples,
            phases,
            max(0.0, length(standing) - waiting),
            max(0.0, waiting),
            {number: seconds for number, seconds in by_set.items() if seconds > 0},
            ended,
            size,
            name,
            line,
        )

    def _open(self, phase: int, now: float) -> list[Span]:
        clock = self._clock
        return [(clock.since, now)] if clock.phase == phase and clock.since else []

    def _present(self, now: float) -> list[float]:
        clock = self._clock
        totals = [*clock.totals]
        if clock.since:
            totals[clock.phase] += max(0.0, now - clock.since)
        return totals

    def _records(self, process_set: int, each: Ring) -> list[Record]:
        """The records of a process set that had not ended at the last call, or are newer; oldest first."""
        first = self._first.get(process_set, 0)
        found: list[Record] = []
        for record in reversed(each.ring.copy()):
            if record.number < first:
                break
            found.append(record)
        found.reverse()
        unfinished = next((one.number for one in found if not one.ended), None)
        if unfinished is None:
            unfinished = found[-1].number + 1 if found else first
        self._first[process_set] = unfinished
        return found

    def _recurrences(self, process_set: int, records: Sequence[Record]) -> int:
        """How often the name by which steps are counted has come since the last call."""
        latest = self._latest.get(process_set, 0)
        found = 0
        for record in records:
            if record.number <= latest:
                continue
            request = record.request
            key = f"{process_set} {request.caller if request.transient else request.name}"
            if key == self._anchor:
                found, self._lone = found + 1, 0
                continue
            self._lone += 1
            if key in self._seen and (not self._anchor or self._lone > _LONE_RECORDS):
                self._anchor, self._lone = key, 0
            if len(self._seen) >= _NAMES_SEEN:
                self._seen.clear()
            self._seen.add(key)
        if records:
            self._latest[process_set] = max(latest, records[-1].number)
        return found


def _inside(at: float, spans: Sequence[Span]) -> bool:
    index = bisect_right(spans, at, key=lambda span: span[0])
    return index > 0 and at <= spans[index - 1][1]
