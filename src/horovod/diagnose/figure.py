"""The frame of a picture of ranks over time, for diagnoses and timelines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class FigureError(RuntimeError):
    """The picture cannot be made; the message says why, and what to do."""


@contextmanager
def rows_over_time(
    path: Path, rows: Sequence[str], span: tuple[float, float], axis: str, colours: Mapping[str, str]
) -> Iterator[Any]:
    """A block that draws into axes with a row for each label, the first at the top. They are written to ``path`` at its end.

    Args:
        path: its suffix says the format.
        span: the beginning and the end of the time axis, in seconds.
        axis: what the time axis shows.
        colours: what each colour means.

    Raises:
        FigureError: matplotlib is missing, or the file cannot be written.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")  # a file, never a window
        from matplotlib import pyplot
        from matplotlib.patches import Patch
    except ImportError as error:
        raise FigureError(f"--plot needs matplotlib: pip install matplotlib ({error})") from error
    figure, axes = pyplot.subplots(figsize=(12, 1.6 + 0.42 * len(rows)), layout="constrained")
    try:
        yield axes
        axes.set_yticks(range(len(rows)), rows)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(*span)
        axes.set_xlabel(axis)
        handles = [Patch(color=colour, label=text) for colour, text in colours.items()]
        figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False)
        try:
            figure.savefig(path, dpi=120)
        except (OSError, ValueError) as error:
            raise FigureError(f"{path} cannot be written: {error}") from error
    finally:
        pyplot.close(figure)
