"""The timeline of all ranks in one file: each rank's collectives and the phases of its steps, by rank 0's clock.

Each rank sends its part every half a second, from the flight recorder and the clock of the steps, and rank 0 writes. So
recording leaves the collectives as they are, the fast path included.

A rank is a process of the trace: the phases of its steps are one row, the collectives of each process set another, and what it
has submitted and waits for are asynchronous events.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from horovod.observe.clock_offset import ClockOffset, Moments
from horovod.observe.flight_recorder import Record
from horovod.observe.progress import Ring
from horovod.observe.step_clock import STEP, PhaseSpan
from horovod.observe.trace_file import Event, TraceFile

PHASE_NAMES = ("data loading", "forward", "backward", "reduction", "update")
"""By the numbers of :mod:`horovod.observe.step_clock`."""
MARK = "horovod_ranks"
"""The name of the first event of such a file."""
PHASE, COLLECTIVE, WAIT = "phase", "collective", "wait"
"""Categories of events."""
_KNOWN = 1 << 16
"""How many collectives of rank 0 are kept to compare clocks by."""


class RankCollective(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One collective that has ended on a rank. Times are by that rank's ``time.monotonic``."""

    process_set: int
    number: int
    order: int
    name: str
    operation: str
    data_type: str
    bytes: int
    engine: str
    line: str
    submitted: float
    agreed: float
    started: float
    ended: float
    error: str


class TimelinePart(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """A rank's collectives and steps since its last report.

    Attributes:
        boot: the same on ranks whose clocks are the same.
        sent: when the rank sent the part, by its clock.
        lost: the number of collectives since the last report that are missing, because the recorder has dropped them.
    """

    boot: str
    sent: float
    spans: list[PhaseSpan]
    collectives: list[RankCollective]
    lost: int


class PartMaker:
    """Makes a rank's parts. For one thread.

    Args:
        boot: as in :class:`TimelinePart`.
    """

    def __init__(self, boot: str) -> None:
        self._boot = boot
        self._latest: dict[int, int] = {}
        self._open: dict[int, list[Record]] = {}

    def make(self, rings: Mapping[int, Ring], spans: Sequence[PhaseSpan], now: float) -> TimelinePart:
        """The part since the last call."""
        found: list[RankCollective] = []
        lost = 0
        for number, each in rings.items():
            latest = self._latest.get(number, 0)
            new: list[Record] = []
            for record in reversed(each.ring.copy()):
                if record.number <= latest:
                    break
                new.append(record)
            if new:
                lost += new[-1].number - latest - 1
                self._latest[number] = new[0].number
            candidates = [*self._open.get(number, ()), *reversed(new)]
            self._open[number] = [one for one in candidates if not one.ended]
            found += [_collective(number, one) for one in candidates if one.ended]
        return TimelinePart(self._boot, now, list(spans), found, lost)


def _collective(process_set: int, record: Record) -> RankCollective:
    request = record.request
    return RankCollective(
        process_set,
        record.number,
        record.order,
        request.name,
        request.operation.name,
        request.tensors[0].data_type.label if request.tensors else "",
        request.nbytes,
        record.engine,
        request.caller,
        record.submitted,
        record.agreed,
        record.started,
        record.ended,
        record.error[:200],
    )


class Clocks:
    """Converts the ranks' times to rank 0's clock. Pure.

    Args:
        boot: that of rank 0, as in :class:`TimelinePart`: parts of other ranks may come before its first one.
    """

    def __init__(self, boot: str) -> None:
        self._boot = boot
        self._known: OrderedDict[tuple[int, int], Moments] = OrderedDict()
        self._offsets: dict[str, ClockOffset] = {}  # by system, whose ranks have one clock

    def offset(self, rank: int, part: TimelinePart, received: float) -> float:
        """The offset to add to the times of a part.

        Args:
            received: when rank 0 received the part, by its clock.
        """
        if rank == 0:
            for each in part.collectives:
                if each.order and each.agreed:
                    self._known[each.process_set, each.order] = Moments(each.submitted, each.agreed)
            while len(self._known) > _KNOWN:
                self._known.popitem(last=False)
            return 0.0
        if part.boot and part.boot == self._boot:
            return 0.0
        offset = self._offsets.setdefault(part.boot or f"rank {rank}", ClockOffset())
        offset.message(part.sent, received)
        for each in part.collectives:
            here = self._known.get((each.process_set, each.order))
            if here is not None and each.agreed:
                offset.collective(here, Moments(each.submitted, each.agreed))
        return offset.seconds


class AllRanksTimeline:
    """One file, from construction to :meth:`close`. For one thread at a time.

    Args:
        hosts: by rank.
        now: the time by rank 0's clock at which the file begins.
        boot: that of rank 0, as in :class:`TimelinePart`.

    Raises:
        OSError: the file cannot be written; so does :meth:`add`.
    """

    def __init__(self, path: str, hosts: Sequence[str], now: float, boot: str) -> None:
        self.path = path
        self._start = now
        self._clocks = Clocks(boot)
        self._rows: set[tuple[int, int]] = set()
        self._file = TraceFile(path)
        events: list[Event] = [{"name": MARK, "ph": "M", "pid": 0, "args": {"ranks": len(hosts)}}]
        for rank, host in enumerate(hosts):
            events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank} ({host})"}})
            events.append({"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}})
            events.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": "steps"}})
        self._file.write(events)

    def add(self, rank: int, part: TimelinePart, received: float) -> None:
        """Write a part of a rank."""
        shift = self._clocks.offset(rank, part, received) - self._start
        events: list[Event] = []
        for phase, begin, end in part.spans:
            at, seconds = begin + shift, end - begin
            if at < 0:
                continue  # before the file begins
            if phase == STEP:
                events.append({"ph": "i", "name": "step", "ts": _micros(at), "s": "p", "pid": rank, "tid": 0})
            else:
                name = PHASE_NAMES[phase]
                events.append(
                    {
                        "ph": "X",
                        "cat": PHASE,
                        "name": name,
                        "ts": _micros(at),
                        "dur": _micros(seconds),
                        "pid": rank,
                        "tid": 0,
                    }
                )
        for each in part.collectives:
            if each.submitted + shift >= 0:
                events += self._collective(rank, each, shift)
        if part.lost:
            text = f"{part.lost} collectives came too quickly to be recorded"
            events.append({"ph": "i", "name": text, "ts": _micros(part.sent + shift), "s": "p", "pid": rank, "tid": 0})
        self._file.write(events)

    def _collective(self, rank: int, each: RankCollective, shift: float) -> Iterable[Event]:
        row = each.process_set + 1
        if (rank, row) not in self._rows:
            self._rows.add((rank, row))
            name = "collectives" + (f" of process set {each.process_set}" if each.process_set else "")
            yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": name}}
        begun = each.started or each.ended
        track = {"pid": rank, "tid": row}
        wait = {"cat": WAIT, "id": f"{rank}.{each.process_set}.{each.number}", "name": each.name, **track}
        yield {"ph": "b", "ts": _micros(each.submitted + shift), **wait}
        yield {"ph": "e", "ts": _micros(begun + shift), **wait}
        shown = {
            "operation": each.operation,
            "bytes": each.bytes,
            "dtype": each.data_type,
            "engine": each.engine,
            "line": each.line,
            "process set": each.process_set,
            "order": each.order,
            "submitted": _micros(each.submitted + shift),
            **({"error": each.error} if each.error else {}),
        }
        begin, end = _micros(begun + shift), _micros(each.ended + shift)
        yield {
            "ph": "X",
            "cat": COLLECTIVE,
            "name": each.name,
            "ts": begin,
            "dur": round(end - begin, 3),
            **track,
            "args": shown,
        }

    def close(self) -> None:
        self._file.close()


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)
