"""The program ``python -m horovod.timeline``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from horovod.diagnose.figure import FigureError
from horovod.timeline.all_ranks import collectives_of_all_ranks, is_of_all_ranks, step_totals
from horovod.timeline.collectives import TimelineError, collectives, load, recorded
from horovod.timeline.page import page
from horovod.timeline.report import text
from horovod.timeline.summary import summarize


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 if the files cannot be read or written."""
    parser = argparse.ArgumentParser(
        prog="python -m horovod.timeline",
        description="Sums up a timeline: time by phase, operation, tensor and rank, bandwidth, and which rank is slow.",
    )
    parser.add_argument("file", type=Path, help="the file that --timeline-filename or hvd.start_timeline named")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw ranks over time into this file (.png, .svg or .pdf)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page for a browser, which needs no network")
    asked = parser.parse_args(arguments)
    try:
        events = load(asked.file)
        of_all_ranks = is_of_all_ranks(events)
        reads = collectives_of_all_ranks if of_all_ranks else collectives
        summary = summarize(recorded(asked.file, lambda: reads(events)))
        steps = step_totals(events) if of_all_ranks else []
        if asked.plot is not None:
            from horovod.timeline.plot import plot

            plot(summary, asked.plot)
        if asked.html is not None:
            try:
                asked.html.write_text(page(summary, asked.file.name, steps), encoding="utf-8")
            except OSError as error:
                raise TimelineError(f"{asked.html} cannot be written: {error.strerror}") from error
        print(text(summary, steps))
    except (TimelineError, FigureError) as error:
        print(f"horovod.timeline: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
