"""How long tests wait. A limit is there to end a test that hangs, so it is far away: a machine may have many times more to do
than it has cores for. No test waits for a limit to pass, and what a test leaves running on purpose runs longer than these.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

SOON = 120.0
"""What should be over at once, in seconds."""
JOB = 250.0
"""A whole job, whose ranks import frameworks: less than the limit of a test."""


def await_file(path: Path) -> None:
    """Return when another process has made this file."""
    deadline = time.monotonic() + SOON
    while not path.exists():
        assert time.monotonic() < deadline, f"there is no {path}"
        time.sleep(0.002)


def of_starts(number: int) -> float:
    """How long this machine, as busy as it is now, takes to start so many interpreters with NumPy, one after another."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import numpy"], check=True, timeout=SOON)
    return number * (time.monotonic() - began)
