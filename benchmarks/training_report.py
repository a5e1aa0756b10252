"""From the step times of ``training.py`` to its table and its picture. Nothing here measures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import machine
from rich.console import Console
from rich.table import Table
from training_arrangements import ALONE, DDP, DDP_GOES_ON, DDP_HOROVOD, DDP_VIEWS, HVD, KERAS_2, MWMS

CHARTED = {
    ALONE: ("alone", "#c4c9d1"),
    KERAS_2: ("alone,\nKeras 2", "#dde0e5"),
    HVD: ("Horovod", "#2b6cb0"),
    DDP: ("DDP", "#ed9b4b"),
    DDP_VIEWS: ("DDP,\nviews", "#f5c08f"),
    DDP_HOROVOD: ("DDP on\nHorovod", "#ed9b4b"),
    DDP_GOES_ON: ("the same,\non loss", "#f5c08f"),
    MWMS: ("MWMS", "#ed9b4b"),
}
"""The arrangements that the picture has, in its order: their names there, and their colours."""
NOTE = (
    "Bar: best of {rounds} rounds, in ms. Thin line: up to the slowest round. Percentage: step time alone / step time of this, "
    "of the best rounds{base}:\nthe share of one process's speed that is left to each rank. All processes have one thread and "
    "the memory settings of horovodrun.\n{peers}{machine}"
)
"""What the picture says of itself."""


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

    def efficiency(self, arrangement: str) -> float:
        """The share of one plain process's speed that is left to each rank; under the peer of Keras 2, of one with Keras 2."""
        of_keras_2 = arrangement == MWMS and KERAS_2 in self.seconds
        return self.ratio(KERAS_2 if of_keras_2 else ALONE, arrangement)

    def to_dict(self) -> dict[str, Any]:
        record = asdict(self)
        record["best_seconds"] = {arrangement: self.best(arrangement) for arrangement in self.seconds}
        record["efficiency"] = {each: self.efficiency(each) for each in self.seconds if each not in (ALONE, KERAS_2)}
        return record


def print_table(results: Sequence[Result], ranks: int, description: dict[str, Any]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=110)
    console.print(machine.in_words(description), highlight=False, soft_wrap=True)
    console.print(
        f"{ranks} ranks of one thread each, the same batch per rank; efficiency = alone / this, of the best rounds",
        highlight=False,
    )
    table = Table("model, parameters", "arrangement")
    for heading in ("ms per step", "median", "slowest", "efficiency", "this / hvd"):
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
                f"{statistics.median(seconds) * 1e3:.1f}",
                f"{max(seconds) * 1e3:.1f}",
                "" if arrangement in (ALONE, KERAS_2) else f"{result.efficiency(arrangement):.1%}",
                "" if arrangement == HVD else f"{result.ratio(arrangement, HVD):.2f}",
            )
    console.print(table)


def plot(results: Sequence[Result], ranks: int, description: dict[str, Any], path: Path) -> None:
    """For each model one bar per contender: the step time of the best round, a line from there to the slowest.

    The background is opaque, so that the picture can be read on a dark page.
    """
    import matplotlib

    matplotlib.use("Agg")  # a file, never a window
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(3.2 * len(results) + 0.6, 4.2), squeeze=False)
    for axis, result in zip(axes[0], results, strict=True):
        shown = [each for each in CHARTED if each in result.seconds]
        for place, arrangement in enumerate(shown):
            height, slowest = result.best(arrangement) * 1e3, max(result.seconds[arrangement]) * 1e3
            axis.bar(place, height, color=CHARTED[arrangement][1], width=0.72)
            axis.vlines(place, height, slowest, color="0.2", linewidth=1)
            text = f"{height:.0f}"
            if arrangement not in (ALONE, KERAS_2):
                text += f"\n{result.efficiency(arrangement):.0%}"
            colour = "white" if arrangement == HVD else "black"
            axis.annotate(
                text,
                (place, 0),
                xytext=(0, 6),
                textcoords="offset points",
                ha="center",
                va="bottom",
                color=colour,
                fontsize=9,
            )
        axis.axhline(result.best(ALONE) * 1e3, color="0.4", linewidth=1, linestyle=":")
        axis.set_xticks(range(len(shown)), [CHARTED[each][0] for each in shown], fontsize=9)
        axis.set_title(f"{result.model}: {result.parameters / 1e6:.1f} M parameters", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("milliseconds per step")
    figure.suptitle(f"A training step of {ranks} ranks, each with the batch of the process alone", fontsize=12)
    rounds = len(next(iter(results[0].seconds.values())))
    words = NOTE.format(
        rounds=rounds,
        base=" (for MWMS: alone with Keras 2)" if KERAS_2 in results[0].seconds else "",
        peers="DDP: on Gloo; views: gradient_as_bucket_view=True.\n" if DDP_VIEWS in results[0].seconds else "",
        machine=machine.in_words(description),
    )
    figure.text(0.5, 0.015, words, ha="center", va="bottom", fontsize=7.5, color="0.3")
    figure.tight_layout(rect=(0, 0.15, 1, 1))
    figure.savefig(path, dpi=150, facecolor="white", bbox_inches="tight", pad_inches=0.2)
    plt.close(figure)
