"""Spark's daemon of Python workers, for an executor that is in a container of YARN of its own: its folder names it."""

from __future__ import annotations

import os
from pathlib import Path

from pyspark import daemon

if __name__ == "__main__":
    os.environ["CONTAINER_ID"] = f"container_{Path.cwd().name}"
    daemon.manager()
