"""From the record of ``observe_cost.py`` to its table. Nothing here measures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import comb
from statistics import median
from typing import Any

Record = dict[str, Any]

CONFIDENCE = 0.95
NAMES = {
    "step, default": "a step, with what is on by default",
    "step, timeline": "a step, with a timeline",
    "step, all ranks": "a step, with a timeline of all ranks",
    "step, off again": "a step, off again: noise",
    "1 KB allreduce, default": "an allreduce of 1 KB, with what is on by default",
    "1 KB allreduce, off again": "an allreduce of 1 KB, off again: noise",
}


def table(record: Record) -> Iterator[str]:
    """In turns first, and then the parts by themselves."""
    yield f"| {record['ranks']} ranks, in turns with everything off | longer by | with 95 % confidence | rounds |"
    yield "|---|---:|---:|---:|"
    for key, name in NAMES.items():
        ratios = record["ratios"][key]
        low, high = interval(ratios)
        yield (
            f"| {name} | {100 * (median(ratios) - 1):.2f} % | {100 * (low - 1):.2f} to {100 * (high - 1):.2f} % | "
            f"{len(ratios)} |"
        )
    names = {name for each in record["direct"] for name in each}
    direct = {name: median(each[name] for each in record["direct"] if name in each) for name in names}
    step = direct["seconds_of_a_step"]
    yield ""
    yield f"| by itself | each | in a step of {1000 * step:.0f} ms | share of the step |"
    yield "|---|---:|---:|---:|"
    total = 0.0
    for name, seconds, times in (
        ("a collective's life in the recorder", direct["life"], direct["collectives"]),
        ("a change of phase", direct["phase"], direct["phases"]),
        ("a report for the watch", direct["report"], direct["reports"]),
    ):
        share = seconds * times / step
        total += share
        yield f"| {name} | {1e6 * seconds:.2f} µs | {times:.3g} | {100 * share:.4f} % |"
    yield f"| all that is on by default |  |  | {100 * total:.4f} % |"
    yield f"| of a collective's life, the append to the ring | {1e6 * direct['append']:.2f} µs |  |  |"
    if "written" in direct:
        slower, written = direct["small"], direct["written"]
        share = (slower * direct["collectives"] + written) / step
        yield f"| with a timeline, a small collective without the fast path takes longer by | {1e6 * slower:.0f} µs | | |"
        yield f"| all that a timeline adds on rank 0, with {1e6 * written:.0f} µs for its events |  |  | {100 * share:.3f} % |"
    if "written_of_all" in direct:
        share = direct["written_of_all"] / step
        yield f"| reports and events of a timeline of all ranks, on rank 0 |  |  | {100 * share:.3f} % |"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the median of what the values are drawn from lies, with a confidence of 95 %: two of the values.

    So many of n values are below the median as of n coins show heads.
    """
    found = sorted(values)
    count, below, least = len(found), 0.0, 0
    while least < count // 2 and below + comb(count, least) / 2**count <= (1 - CONFIDENCE) / 2:
        below += comb(count, least) / 2**count
        least += 1
    least = max(0, least - 1)
    return found[least], found[count - 1 - least]
