"""Draws the pictures of the documents that show what a tool of Horovod draws: ``python docs/pictures.py``. Needs matplotlib.

It runs the program of ``why-does-my-job-hang.md`` whose ranks go apart, and one with a slow rank, and then the tools. Pictures
of measurements are drawn by ``benchmarks/publish.py``.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
sys.path.insert(0, str(ROOT / "benchmarks"))

import publish  # noqa: E402  the folder of benchmarks comes first

from horovod._base.version import VERSION  # noqa: E402  after the path is set

HANGS = ROOT / "docs" / "why-does-my-job-hang.md"
FENCE = re.compile(r"^```python diagnosed(?P<settings>[^\n]*)\n(?P<program>.*?)^```$", re.DOTALL | re.MULTILINE)
SLOW = """
import time
import torch
import horovod.torch as hvd

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001), model.named_parameters())
for step in range(5):
    time.sleep(0.02 if hvd.rank() != 2 else 0.05)  # loads a batch
    optimizer.zero_grad()
    model(torch.randn(64, 512)).sum().backward()
    optimizer.step()
"""
"""The batches of rank 2 come late."""
RANKS = 3


def main() -> None:
    draw(IMAGES / "hang.png")
    draw_slow(IMAGES / "slow.png")
    day = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    for picture, program in (("hang.png", program_that_hangs()[0]), ("slow.png", SLOW)):
        publish.mark(IMAGES / picture, f"docs/pictures.py; Horovod {VERSION}, {day}; program {checksum(program)}")


def program_that_hangs() -> tuple[str, dict[str, str]]:
    """The first program of the page, and the environment variables that it is run with."""
    found = FENCE.search(HANGS.read_text())
    if found is None:
        sys.exit(f"{HANGS} has no program that is diagnosed")
    return found["program"], dict(each.split("=", 1) for each in found["settings"].split())


def checksum(program: str) -> str:
    return hashlib.sha256(program.encode()).hexdigest()[:16]


def draw(picture: Path) -> None:
    """Run the program that hangs, and have the flight recorders of its ranks drawn."""
    program, settings = program_that_hangs()
    with tempfile.TemporaryDirectory() as folder:
        script, recorders = Path(folder) / "train.py", Path(folder) / "recorders"
        script.write_text(program)
        environment = {**os.environ, **settings, "HOROVOD_FLIGHT_RECORDER_DIR": str(recorders)}
        launch = [sys.executable, "-m", "horovod.runner.launch", "-np", str(RANKS), sys.executable, str(script)]
        subprocess.run(launch, env=environment, cwd=folder, capture_output=True, timeout=300)  # it fails, as it should
        diagnose = [sys.executable, "-m", "horovod.diagnose", str(recorders), "--plot", str(picture)]
        subprocess.run(diagnose, check=True, timeout=300, stdout=subprocess.DEVNULL)


def draw_slow(picture: Path) -> None:
    """Run the program with a slow rank, and have the timeline of all ranks drawn."""
    with tempfile.TemporaryDirectory() as folder:
        script, timeline = Path(folder) / "train.py", Path(folder) / "timeline.json"
        script.write_text(SLOW)
        environment = {**os.environ, "HOROVOD_TIMELINE_ALL_RANKS": "1", "HOROVOD_TIMELINE": str(timeline)}
        launch = [sys.executable, "-m", "horovod.runner.launch", "-np", str(RANKS), sys.executable, str(script)]
        subprocess.run(launch, env=environment, cwd=folder, check=True, capture_output=True, timeout=300)
        tool = [sys.executable, "-m", "horovod.timeline", str(timeline), "--plot", str(picture)]
        subprocess.run(tool, check=True, timeout=300, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
