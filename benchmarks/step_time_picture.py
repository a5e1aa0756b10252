"""Draws ``docs/images/step-time.png``: one training step beside DistributedDataParallel and Horovod 0.28.

    python benchmarks/step_time_picture.py benchmarks/step_time.json docs/images/step-time.png

The record holds milliseconds a step, measured side by side in one run (docs/performance.md says how). Bars show them as
multiples of the step of one process alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {"this project": "#2b6cb0", "PyTorch DDP": "#a0aec0", "Horovod 0.28 on Gloo": "#e2b07a"}
ALONE = "one process alone"


def draw(record: dict[str, Any], target: Path) -> None:
    """Draw one group of bars for each model of ``record``."""
    models: dict[str, dict[str, float]] = record["milliseconds"]
    figure, axes = plt.subplots(figsize=(8.0, 3.4), dpi=150)
    width = 0.8 / len(COLOURS)
    for place, (name, colour) in enumerate(COLOURS.items()):
        ratios = [times[name] / times[ALONE] for times in models.values()]
        positions = [index + (place - (len(COLOURS) - 1) / 2) * width for index in range(len(models))]
        bars = axes.bar(positions, ratios, width * 0.94, color=colour, label=name)
        axes.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], fontsize=9, padding=2)
    axes.axhline(1.0, color="black", linewidth=1, linestyle="--", label=ALONE)
    axes.set_xticks(range(len(models)), list(models))
    axes.set_xlim(-0.5, len(models) - 0.5)
    axes.set_ylabel("time of one step, 2 ranks\n(less is better)")
    axes.set_ylim(0, 3.0)
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(target)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    draw(json.loads(arguments.record.read_text()), arguments.picture)


if __name__ == "__main__":
    main()
