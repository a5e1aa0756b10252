"""A picture of a timeline: ranks over time with their waits, and the collectives that were carried out."""

from __future__ import annotations

from pathlib import Path

from horovod.timeline.collectives import TimelineError
from horovod.timeline.summary import Summary, waits

SECONDS = 5.0
"""How much of the end of the recording the picture shows, at most."""
MOST_RANKS = 64
_WAIT, _RUN = "#e8a33d", "#3b7dd8"


def plot(summary: Summary, path: Path) -> None:
    """Draw into a file, whose suffix says the format.

    Raises:
        TimelineError: matplotlib is missing, or the file cannot be written.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
        from matplotlib.patches import Patch
    except ImportError as error:
        raise TimelineError(f"--plot needs matplotlib: pip install matplotlib ({error})") from error
    end = max(each.ended for each in summary.batches)
    begin = end - min(SECONDS, summary.seconds)
    waited = dict(list(waits(summary.batches).items())[:MOST_RANKS])
    figure, axes = pyplot.subplots(figsize=(12, 1.9 + 0.42 * len(waited)), layout="constrained")
    runs = [
        (max(begin, each.begun), each.ended - max(begin, each.begun)) for each in summary.batches if each.ended > begin
    ]
    axes.broken_barh(runs, (-0.4, 0.8), facecolors=_RUN, edgecolor="none")
    for row, intervals in enumerate(waited.values(), 1):
        spans = [(max(begin, start), stop - max(begin, start)) for start, stop in intervals if stop > begin]
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=_WAIT, edgecolor="none")
    axes.set_yticks(range(len(waited) + 1), ["collectives", *(f"rank {rank}" for rank in waited)])
    axes.set_ylim(len(waited) + 0.6, -0.6)
    axes.set_xlim(begin, end)
    axes.set_xlabel("seconds since the recording began")
    handles = [
        Patch(color=_RUN, label="is carried out"),
        Patch(color=_WAIT, label="has submitted what another rank has not"),
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=2, frameon=False)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise TimelineError(f"{path} cannot be written: {error}") from error
    finally:
        pyplot.close(figure)
