"""How programs here start jobs."""

from __future__ import annotations

import sys


def horovodrun(ranks: int, *arguments: str) -> list[str]:
    """The command line of a job of so many ranks: options of horovodrun, and the program of each rank."""
    return [sys.executable, "-m", "horovod.runner.launch", "-np", str(ranks), *arguments]
