"""A picture of a timeline: ranks over time with their waits, and the collectives that were carried out."""

from __future__ import annotations

from pathlib import Path

from horovod.diagnose.figure import rows_over_time
from horovod.timeline.summary import Interval, Summary, waits

SECONDS = 5.0
"""How much of the end of the recording the picture shows, at most."""
MOST_RANKS = 64
_WAIT, _RUN = "#e8a33d", "#3b7dd8"


def plot(summary: Summary, path: Path) -> None:
    """Draw into a file, whose suffix says the format.

    Raises:
        FigureError: matplotlib is missing, or the file cannot be written.
    """
    end = max(each.ended for each in summary.batches)
    begin = end - min(SECONDS, summary.seconds)

    def shown(start: float, stop: float) -> Interval:
        return max(begin, start), stop - max(begin, start)

    waited = dict(list(waits(summary.batches).items())[:MOST_RANKS])
    rows = ["collectives", *(f"rank {rank}" for rank in waited)]
    colours = {_RUN: "is carried out", _WAIT: "has submitted what another rank has not"}
    with rows_over_time(path, rows, (begin, end), "seconds since the recording began", colours) as axes:
        runs = [shown(each.begun, each.ended) for each in summary.batches if each.ended > begin]
        axes.broken_barh(runs, (-0.4, 0.8), facecolors=_RUN, edgecolor="none")
        for row, intervals in enumerate(waited.values(), 1):
            bars = [shown(start, stop) for start, stop in intervals if stop > begin]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=_WAIT, edgecolor="none")
