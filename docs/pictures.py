"""Draws the pictures of the documents that show what a tool of Horovod draws: ``python docs/pictures.py``. Needs matplotlib.

It runs a program whose ranks go apart, and then the tool. Pictures of measurements are drawn by ``benchmarks/publish.py``.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
sys.path.insert(0, str(ROOT / "benchmarks"))

import publish  # noqa: E402  the folder of benchmarks comes first

from horovod import _version  # noqa: E402

PROGRAM = """
import time
import torch
import horovod.torch as hvd

hvd.init()
for step in range(10):
    time.sleep(0.2 + 0.1 * hvd.rank())  # computes
    hvd.allreduce(torch.ones(8), name="embedding")
    if step < 7 or hvd.rank() != 1:
        hvd.allreduce(torch.ones(8), name="attention")
    hvd.allreduce(torch.ones(8), name="head")
"""
"""Rank 1 skips a collective in the eighth step."""
SETTINGS = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "1"}
RANKS = 3


def main() -> None:
    draw(IMAGES / "hang.png")
    day = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    publish.mark(IMAGES / "hang.png", f"docs/pictures.py; Horovod {_version.VERSION}, {day}")


def draw(picture: Path) -> None:
    """Run the program, and have the flight recorders of its ranks drawn."""
    with tempfile.TemporaryDirectory() as folder:
        script, recorders = Path(folder) / "train.py", Path(folder) / "recorders"
        script.write_text(PROGRAM)
        environment = {**os.environ, **SETTINGS, "HOROVOD_FLIGHT_RECORDER_DIR": str(recorders)}
        launch = [sys.executable, "-m", "horovod.runner.launch", "-np", str(RANKS), sys.executable, str(script)]
        subprocess.run(launch, env=environment, cwd=folder, capture_output=True, timeout=300)  # it fails, as it should
        diagnose = [sys.executable, "-m", "horovod.diagnose", str(recorders), "--plot", str(picture)]
        subprocess.run(diagnose, check=True, timeout=300, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
