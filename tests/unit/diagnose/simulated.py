"""A job of simulated ranks, each with a script and a clock of its own: what they would have written down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from horovod.observe.dump import SCHEMA, CollectiveRecord, Folder, ProcessSetState, RankDump, TensorRecord
from horovod.observe.threads import Frame, ThreadState

WAITING = Frame("/x/horovod/core/requests/handle.py", 1, "wait")

Script = Sequence[str]
"""The names of the collectives that a rank calls one after another, waiting for each."""


def run(
    scripts: Sequence[Script],
    compute: Mapping[int, float] | None = None,
    clocks: Sequence[float] | None = None,
    latency: float = 0.001,
    ring: int = 2000,
) -> Folder:
    """Run scripts until no rank can go on.

    Args:
        compute: by rank, the seconds that it computes before each collective; 0.01 where nothing is said.
        clocks: by rank, what its clock shows more than the true one. Ranks without are on one host.
    """
    size = len(scripts)
    now = [0.0] * size
    done = [0] * size
    records: list[list[CollectiveRecord]] = [[] for _ in range(size)]
    counts: list[dict[str, int]] = [{} for _ in range(size)]
    open_: list[tuple[str, float] | None] = [None] * size
    order = 0

    def submit(rank: int) -> None:
        if open_[rank] is None and done[rank] < len(scripts[rank]):
            name = scripts[rank][done[rank]]
            now[rank] += (compute or {}).get(rank, 0.01)
            counts[rank][name] = counts[rank].get(name, 0) + 1
            open_[rank] = (name, now[rank])

    while True:
        for rank in range(size):
            submit(rank)
        names = {each[0] for each in open_ if each is not None}
        if len(names) != 1 or any(each is None for each in open_):
            break
        order += 1
        agreed = max(each[1] for each in open_ if each is not None) + latency
        for rank in range(size):
            records[rank].append(_record(rank, done[rank] + 1, counts[rank], open_[rank], order, agreed, latency))
            now[rank] = agreed + latency
            open_[rank] = None
            done[rank] += 1
    end = max(now) + 1.0
    dumps = {}
    for rank in range(size):
        waiting = open_[rank]
        if waiting is not None:
            records[rank].append(_record(rank, done[rank] + 1, counts[rank], waiting, 0, 0.0, 0.0))
        shift = 0.0 if clocks is None else clocks[rank]
        dumps[rank] = RankDump(
            SCHEMA, "v", "job", 1, rank, size, f"host{rank}" if clocks else "host", 100 + rank, "stall", "no progress", -1, "",
            end + shift, 1e9 + end, f"boot{rank}" if clocks else "boot",
            [f"host{each}" if clocks else "host" for each in range(size)],
            [ProcessSetState(0, list(range(size)), "shm", len(records[rank]), order)],
            [_shifted(each, shift) for each in records[rank][-ring:]],
            [ThreadState("MainThread", True, False, [WAITING] if waiting else [Frame("train.py", 7, "f", "x = y", True)])],
        )  # fmt: skip
    return Folder(dumps, {}, None)


def _record(
    rank: int, number: int, counts: dict[str, int], submitted: tuple[str, float] | None, order: int, agreed: float, took: float
) -> CollectiveRecord:  # fmt: skip
    assert submitted is not None
    name, at = submitted
    over = order > 0
    return CollectiveRecord(
        0, number, counts[name], order, name, "ALLREDUCE", [TensorRecord(name, "float32", [4])], 16, f"train.py:{len(name)}",
        at,
        agreed if over else None, agreed if over else None, agreed + took if over else None, "shm" if over else "", "",
    )  # fmt: skip


def _shifted(record: CollectiveRecord, shift: float) -> CollectiveRecord:
    import msgspec

    times = {
        name: value + shift
        for name in ("submitted", "agreed", "started", "ended")
        if (value := getattr(record, name)) is not None
    }
    return msgspec.structs.replace(record, **times)
