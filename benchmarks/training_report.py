"""From the step times of ``training.py`` to its table and its picture. Nothing here measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import machine
from rich.console import Console
from rich.table import Table
from training_arrangements import ALONE, DDP, DDP_KEPT, HVD, KEPT, KERAS_2, MWMS, MWMS_KEPT, ONE_RANK, SIDE_BY_SIDE


@dataclass
class Result:
    """One model's step times in seconds, by arrangement, one for each round."""

    model: str
    parameters: int
    tensors: int
    seconds: dict[str, list[float]]

    def best(self, arrangement: str) -> float:
        return min(self.seconds[arrangement])

    def ratio(self, numerator: str, denominator: str) -> float:
        """One arrangement's step time over the other's, each in its best round."""
        return self.best(numerator) / self.best(denominator)

    def to_dict(self) -> dict[str, Any]:
        record = asdict(self)
        record["best_seconds"] = {arrangement: self.best(arrangement) for arrangement in self.seconds}
        record["efficiency"] = {each: self.ratio(ALONE, each) for each in self.seconds if each != ALONE}
        return record


def print_table(results: Sequence[Result], ranks: int, description: dict[str, Any]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=110)
    console.print(machine.in_words(description), highlight=False, soft_wrap=True)
    console.print(
        f"{ranks} ranks of one thread each, the same batch per rank; efficiency = alone / this", highlight=False
    )
    table = Table("model, parameters", "arrangement")
    for heading in ("ms per step", "fastest to slowest turn", "efficiency", "this / hvd"):
        table.add_column(heading, justify="right")
    for result in results:
        table.add_section()
        size = f"{result.parameters / 1e6:.1f} M in {result.tensors} tensors"
        for name, arrangement in zip_longest((result.model, size), result.seconds, fillvalue=""):
            seconds = result.seconds[arrangement]
            table.add_row(
                name,
                arrangement,
                f"{result.best(arrangement) * 1e3:.1f}",
                f"{min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f}",
                "" if arrangement == ALONE else f"{result.ratio(ALONE, arrangement):.1%}",
                "" if arrangement == HVD else f"{result.ratio(arrangement, HVD):.2f}",
            )
    console.print(table)


def plot(results: Sequence[Result], ranks: int, description: dict[str, Any], path: Path) -> None:
    """For each model one bar per arrangement: the step time of the best round, a line from there to the slowest."""
    import matplotlib

    matplotlib.use("Agg")  # a file, never a window
    import matplotlib.pyplot as plt

    colours = {
        ALONE: "0.75",
        KEPT: "0.65",
        ONE_RANK: "tab:cyan",
        SIDE_BY_SIDE: "0.55",
        HVD: "tab:blue",
        DDP: "tab:orange",
        DDP_KEPT: "#ffb56b",
        KERAS_2: "0.85",
        MWMS: "tab:orange",
        MWMS_KEPT: "#ffb56b",
    }
    labels = {
        KEPT: "alone,\nkept",
        ONE_RANK: "hvd\n1 rank",
        SIDE_BY_SIDE: "side by\nside",
        HVD: f"hvd\n{ranks} ranks",
        DDP: f"DDP\n{ranks} ranks",
        DDP_KEPT: "DDP,\nkept",
        KERAS_2: "alone,\nKeras 2",
        MWMS: f"MWMS\n{ranks} ranks",
        MWMS_KEPT: "MWMS,\nkept",
    }
    figure, axes = plt.subplots(1, len(results), figsize=(4.6 * len(results) + 0.5, 4.4), squeeze=False)
    for axis, result in zip(axes[0], results, strict=True):
        for place, (arrangement, seconds) in enumerate(result.seconds.items()):
            height = result.best(arrangement) * 1e3
            axis.bar(place, height, color=colours[arrangement], width=0.72)
            axis.vlines(place, min(seconds) * 1e3, max(seconds) * 1e3, color="0.2", linewidth=1)
            text = f"{height:.0f}" if arrangement == ALONE else f"{height:.0f}\n{result.ratio(ALONE, arrangement):.0%}"
            axis.annotate(
                text,
                (place, 0),
                xytext=(0, 6),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=9,
                color="white" if arrangement == HVD else "black",
            )
        axis.axhline(result.best(ALONE) * 1e3, color="0.4", linewidth=1, linestyle=":")
        axis.set_xticks(range(len(result.seconds)), [labels.get(each, each) for each in result.seconds], fontsize=8)
        axis.set_title(
            f"{result.model}: {result.parameters / 1e6:.1f} M parameters in {result.tensors} tensors", fontsize=10
        )
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("milliseconds per step")
    figure.suptitle("Step time with the same batch per rank, and efficiency against one rank alone", fontsize=12)
    figure.text(0.5, 0.01, machine.in_words(description), ha="center", fontsize=7.5, color="0.4")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=130)
    plt.close(figure)
