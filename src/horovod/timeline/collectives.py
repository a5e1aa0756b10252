"""Reads a timeline: the collectives that its events describe."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from horovod.comm.datatypes import DataType

_NEGOTIATE = "NEGOTIATE_"
_ITEM_BYTES = {each.label: each.itemsize for each in DataType}


class TimelineError(Exception):
    """A timeline cannot be read or shown; says why."""


class RecordedCollective(NamedTuple):
    """One collective on one tensor, as rank 0 has recorded it. Times are seconds since the recording began.

    Attributes:
        submitted: when each rank submitted it, by rank in the process set.
        agreed: when rank 0 knew of all ranks' submissions.
        shape: the shape of rank 0's input.
        bytes: the size of rank 0's input.
    """

    tensor: str
    operation: str
    engine: str
    submitted: Mapping[int, float]
    agreed: float
    begun: float
    ended: float
    data_type: str
    shape: str
    bytes: int


def load(path: Path) -> list[dict[str, Any]]:
    """The events of a timeline.

    Raises:
        TimelineError: the file cannot be read, or is not a timeline.
    """
    try:
        events = json.loads(path.read_bytes())
    except OSError as error:
        raise TimelineError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise TimelineError(f"{path} is not JSON, so it is not a timeline: {error}") from error
    if not isinstance(events, list) or not all(isinstance(each, dict) for each in events):
        raise TimelineError(f"{path} is not a timeline that Horovod has written (it is not a list of events)")
    return events


def read(path: Path) -> list[RecordedCollective]:
    """The collectives of rank 0's timeline (:func:`recorded`)."""
    events = load(path)
    return recorded(path, lambda: collectives(events))


def recorded(path: Path, reads: Callable[[], Iterable[RecordedCollective]]) -> list[RecordedCollective]:
    """The collectives that ``reads`` finds, in the order in which they began. Collectives that had not ended are left out.

    Raises:
        TimelineError: the events are not Horovod's, or no collective has ended.
    """
    try:
        found = sorted(reads(), key=lambda each: each.begun)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise TimelineError(
            f"{path} is not a timeline that Horovod has written ({type(error).__name__}: {error})"
        ) from error
    if not found:
        raise TimelineError(f"{path} has no collective that has ended")
    return found


def collectives(events: Iterable[Mapping[str, Any]]) -> list[RecordedCollective]:
    """The collectives that events describe, which stand in the order in which they were recorded."""
    rows: dict[int, _Row] = {}
    found: list[RecordedCollective] = []
    for event in events:
        kind, pid = event["ph"], event["pid"]
        if kind == "M" and event["name"] == "process_name" and "name" in event["args"]:
            rows[pid] = _Row(event["args"]["name"])
        elif kind == "B":
            rows[pid].begin(event)
        elif kind == "X":
            rows[pid].marks[int(event["name"])] = event["ts"] / 1e6
        elif kind == "E" and pid in rows:
            ended = rows[pid].end(event)
            if ended is not None:
                found.append(ended)
    return found


class _Row:
    """The events of one tensor."""

    def __init__(self, tensor: str) -> None:
        self.marks: dict[int, float] = {}
        self._tensor = tensor
        self._open: list[tuple[str, float]] = []
        self._engine = ""
        self._agreed: float | None = None

    def begin(self, event: Mapping[str, Any]) -> None:
        name = event["name"]
        if name.startswith(_NEGOTIATE):
            self.marks, self._agreed = {}, None
        self._engine = event.get("args", {}).get("engine", self._engine)
        self._open.append((name, event["ts"] / 1e6))

    def end(self, event: Mapping[str, Any]) -> RecordedCollective | None:
        """The collective that is over with this event, if one is."""
        name, begun = self._open.pop()
        at = event["ts"] / 1e6
        if name.startswith(_NEGOTIATE):
            self._agreed = at
            return None
        if self._open:  # the engine's activity, inside the operation
            return None
        shown = event.get("args", {})
        data_type, shape = shown.get("dtype", ""), shown.get("shape", "[]")
        size = _ITEM_BYTES.get(data_type, 0) * math.prod(json.loads(shape))
        agreed = begun if self._agreed is None else self._agreed  # None: submitted before the recording began
        marks, self.marks, self._agreed = self.marks, {}, None
        return RecordedCollective(self._tensor, name, self._engine, marks, agreed, begun, at, data_type, shape, size)
