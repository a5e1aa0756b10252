"""The program ``python -m horovod.diagnose``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from horovod.diagnose.dumped_job import DumpedJob
from horovod.diagnose.figure import FigureError
from horovod.diagnose.findings import findings
from horovod.diagnose.report import diagnosis, text
from horovod.observe.dump import DumpError, read


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 if the files cannot be read or written."""
    parser = argparse.ArgumentParser(
        prog="python -m horovod.diagnose",
        description="Explains what happened in a job, from the files that its ranks wrote.",
    )
    parser.add_argument(
        "folder",
        nargs="+",
        type=Path,
        help="the folder the ranks wrote to; several for one job, such as one from each host",
    )
    parser.add_argument("--json", action="store_true", help="print the diagnosis as JSON, for tools (docs/diagnose.md)")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw ranks over time into this file (.png, .svg or .pdf)"
    )
    parser.add_argument(
        "--pytorch",
        type=Path,
        metavar="DIR",
        help="write what the ranks did in the format of PyTorch's flight recorder, one file for each rank",
    )
    asked = parser.parse_args(arguments)
    try:
        job = DumpedJob(read(asked.folder))
        if asked.pytorch is not None:
            from horovod.diagnose.pytorch import write_traces

            write_traces(job, asked.pytorch)
        if asked.plot is not None:
            from horovod.diagnose.plot import plot

            plot(job, asked.plot)
        found = findings(job)
        print(
            msgspec.json.format(msgspec.json.encode(diagnosis(job, found)), indent=2).decode()
            if asked.json
            else text(job, found)
        )
    except (DumpError, FigureError) as error:
        print(f"horovod.diagnose: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
