"""A picture of a job: ranks over time, each collective from its submission to its end, with the waits coloured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from horovod.diagnose.dumped_job import DumpedJob
from horovod.diagnose.figure import rows_over_time

SECONDS = 20.0
"""How much time before the end the picture shows, at most."""
MOST_RANKS = 64
_WAIT, _RUN, _OPEN, _FAILED = "#e8a33d", "#3b7dd8", "#c0392b", "#7b3fa0"


def plot(job: DumpedJob, path: Path) -> None:
    """Draw ``job`` into a file, whose suffix says the format.

    Raises:
        FigureError: matplotlib is missing, or the file cannot be written.
    """
    ranks = sorted(job.dumps)[:MOST_RANKS]
    end, begin = _window(job, ranks)
    rows = [f"rank {rank} ({job.host(rank)})" for rank in ranks]
    colours = {_WAIT: "waits for other ranks", _RUN: "is carried out", _OPEN: "not over", _FAILED: "failed"}
    with rows_over_time(path, rows, (begin - end, 0.0), "seconds before the end", colours) as axes:
        for row, rank in enumerate(ranks):
            bars: dict[str, list[tuple[float, float]]] = {_WAIT: [], _RUN: [], _OPEN: [], _FAILED: []}
            for each in job.dumps[rank].collectives:
                submitted = job.time(rank, each.submitted)
                started = job.time(rank, each.started) if each.started is not None else None
                ended = job.time(rank, each.ended) if each.ended is not None else None
                stop = end if ended is None else ended
                if stop < begin:
                    continue
                if ended is None:
                    bars[_OPEN].append((max(begin, submitted) - end, stop - max(begin, submitted)))
                    continue
                agreed = stop if started is None else started
                bars[_WAIT].append((max(begin, submitted) - end, max(0.0, agreed - max(begin, submitted))))
                bars[_FAILED if each.error else _RUN].append((max(begin, agreed) - end, stop - max(begin, agreed)))
            for colour, spans in bars.items():
                axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=colour, edgecolor="none")
            _label_open(axes, job, rank, row)


def _window(job: DumpedJob, ranks: list[int]) -> tuple[float, float]:
    """The end and the beginning of the shown time. Collectives that have not ended take at most a quarter of it."""
    end = job.end
    over = [
        job.time(rank, each.ended) for rank in ranks for each in job.dumps[rank].collectives if each.ended is not None
    ]
    first = [job.time(rank, each.submitted) for rank in ranks for each in job.dumps[rank].collectives]
    idle = end - max(over, default=end)
    return end, max(min(first, default=end - 1.0), end - max(SECONDS, idle * 4 / 3))


def _label_open(axes: Any, job: DumpedJob, rank: int, row: int) -> None:
    waiting = [each for each in job.dumps[rank].collectives if each.ended is None]
    if waiting:
        more = f" and {len(waiting) - 1} more" if len(waiting) > 1 else ""
        axes.annotate(
            waiting[0].name + more,
            (0, row),
            xytext=(-4, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=8,
            color="white",
        )
