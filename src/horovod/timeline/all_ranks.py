"""Reads a timeline of all ranks: its collectives, as in any timeline, and the phases of each rank's steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from horovod.observe.all_ranks import COLLECTIVE, MARK, PHASE, PHASE_NAMES
from horovod.timeline.collectives import RecordedCollective
from horovod.timeline.summary import Interval, length, union

_REDUCTION = "reduction"

Event = Mapping[str, Any]


class StepTotal(NamedTuple):
    """One rank's steps.

    Attributes:
        phases: the seconds in each of ``PHASE_NAMES``.
        carried_out: the seconds in which collectives were carried out.
        hidden: the part of ``carried_out`` in which the script went on meanwhile.
    """

    rank: int
    steps: int
    phases: dict[str, float]
    carried_out: float
    hidden: float


def is_of_all_ranks(events: Sequence[Event]) -> bool:
    return bool(events) and events[0].get("name") == MARK


def collectives_of_all_ranks(events: Iterable[Event]) -> list[RecordedCollective]:
    """The collectives that several ranks have recorded or one alone, with the times of the lowest rank's engine."""
    known: dict[tuple[int, int], dict[int, Event]] = defaultdict(dict)
    ends: dict[tuple[int, int, float], float] = {}
    for event in events:
        if event.get("cat") != COLLECTIVE or not event["args"]["order"]:
            continue
        rank, shown = event["pid"], event["args"]
        known[shown["process set"], shown["order"]][rank] = event
        batch = rank, shown["process set"], event["ts"]
        ends[batch] = max(ends.get(batch, 0.0), event["ts"] + event["dur"])
    found = []
    for (process_set, _), by_rank in known.items():
        rank = min(by_rank)
        event = by_rank[rank]
        shown, begun = event["args"], event["ts"]
        found.append(
            RecordedCollective(
                event["name"],
                shown["operation"],
                shown["engine"],
                {each: other["args"]["submitted"] / 1e6 for each, other in by_rank.items()},
                begun / 1e6,
                begun / 1e6,
                ends[rank, process_set, begun] / 1e6,
                shown["dtype"],
                "[]",
                shown["bytes"],
            )
        )
    return found


def step_totals(events: Iterable[Event]) -> list[StepTotal]:
    """By rank, without ranks whose optimizer has not recorded the phases of its steps."""
    steps: dict[int, int] = defaultdict(int)
    phases: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PHASE_NAMES, 0.0))
    standing: dict[int, list[Interval]] = defaultdict(list)
    running: dict[int, list[Interval]] = defaultdict(list)
    for event in events:
        rank = event["pid"]
        if event["ph"] == "i" and event["name"] == "step":
            steps[rank] += 1
        if event["ph"] != "X":
            continue
        span = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
        if event["cat"] == PHASE:
            phases[rank][event["name"]] += span[1] - span[0]
            if event["name"] == _REDUCTION:
                standing[rank].append(span)
        elif event["cat"] == COLLECTIVE:
            running[rank].append(span)
    found = []
    for rank in sorted(phases):
        carried_out = length(union(running[rank]))
        beside = length(union([*running[rank], *standing[rank]])) - length(union(standing[rank]))
        found.append(StepTotal(rank, steps[rank], phases[rank], carried_out, beside))
    return found
