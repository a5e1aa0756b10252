"""The program ``python -m horovod.top``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from horovod.top.query import JobEnded, QueryError, ask, rank_0_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0; 1 if rich is missing; 2 if there is no such job."""
    parser = argparse.ArgumentParser(
        prog="python -m horovod.top",
        description="Shows what a running job does: steps, bandwidth, and where its ranks spend their time. Ctrl-C ends it.",
    )
    parser.add_argument(
        "job",
        nargs="?",
        metavar="JOB|PID",
        help="the process of horovodrun or of a rank, or the number of a batch job, on the host of rank 0; without it, the "
        "only job on this host",
    )
    parser.add_argument("--once", action="store_true", help="show it once, and exit")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between two views (default 1)"
    )
    asked = parser.parse_args(arguments)
    try:
        from rich.console import Console
        from rich.live import Live

        from horovod.top.view import view
    except ImportError as error:
        print(f"horovod.top: the live view needs rich: pip install 'horovod[top]' ({error})", file=sys.stderr)
        return 1
    console = Console()
    try:
        pid = rank_0_of(asked.job)
        if asked.once:
            console.print(view(ask(pid)))
            return 0
        with Live(view(ask(pid)), console=console, auto_refresh=False, screen=console.is_terminal) as live:
            while True:
                time.sleep(max(0.1, asked.interval))
                most = max(4, console.height - 6) if console.is_terminal else 64
                live.update(view(ask(pid), most), refresh=True)
    except JobEnded as end:
        print(f"horovod.top: {end}")
        return 0
    except QueryError as error:
        print(f"horovod.top: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
