"""From the measurements of ``collectives.py`` to its tables and its picture. Nothing here measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import machine
import torch
from rich.console import Console
from rich.table import Table

ONE_SMALL = "1 KB allreduce, synchronous"
MANY_SMALL = "500 x 4 KB allreduce, asynchronous"
RESNET = "ResNet-50, 161 gradients, asynchronous"
OBJECT = "broadcast_object, 1 KB"
LARGE = 64 << 20
WIDTHS = {f"64 MB of {name}": getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
FLOAT32, *HALVES = WIDTHS
PATTERNS = (ONE_SMALL, MANY_SMALL, RESNET, *WIDTHS, OBJECT)

OURS = "horovod"
COPY_ALONE, COPY_TOGETHER = "memcpy by one rank", "memcpy by all ranks"


@dataclass
class Row:
    """One contender's times for one operation at one size; seconds per call on the slowest rank."""

    contender: str
    operation: str
    size: int
    median: float
    p95: float
    calls: int

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes of the operation's size per second."""
        return self.size / self.median

    def bus_bandwidth(self, ranks: int) -> float:
        """Algorithm bandwidth times the share of the size that each rank must move at least."""
        others = (ranks - 1) / ranks
        return self.algorithm_bandwidth * {"broadcast": 1.0, "allreduce": 2 * others}.get(self.operation, others)


@dataclass
class Job:
    """Everything that one job on one engine measured."""

    engine: str
    ranks: int
    idle: float | None = None
    rows: list[Row] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(record: dict[str, Any]) -> Job:
        return Job(**{**record, "rows": [Row(**row) for row in record["rows"]]})

    @property
    def peer(self) -> str:
        """The other contender's name, "" where there was none."""
        return next((row.contender for row in self.rows if row.contender not in (OURS, COPY_ALONE, COPY_TOGETHER)), "")

    def find(self, contender: str, operation: str, size: int) -> Row | None:
        key = (contender, operation, size)
        return next((row for row in self.rows if (row.contender, row.operation, row.size) == key), None)


def print_tables(jobs: Sequence[Job], description: dict[str, Any]) -> None:
    """Two tables for each job: the operations by size, and the patterns of a training step."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    console.print(machine.in_words(description), highlight=False, soft_wrap=True)
    for job in jobs:
        console.print(f"\n{job.ranks} ranks, engine {job.engine}", highlight=False)
        for table in (_operations_table(job), _patterns_table(job)):
            if table.row_count:
                console.print(table)
        if job.idle is not None:
            console.print(f"doing nothing after init: {job.idle:.3f} % of a core per rank", highlight=False)


def _operations_table(job: Job) -> Table:
    table = Table("operation")
    for heading in ("size", "median", "p95", "algbw GB/s", "busbw GB/s"):
        table.add_column(heading, justify="right")
    if job.peer:
        for heading in (f"{job.peer} median", "p95", "busbw GB/s", "ratio"):
            table.add_column(heading, justify="right")
    previous = ""
    for row in job.rows:
        if row.contender != OURS or row.operation in PATTERNS:
            continue
        if previous not in ("", row.operation):
            table.add_section()
        cells = [row.operation, bytes_in_words(row.size), seconds_in_words(row.median), seconds_in_words(row.p95)]
        cells += [f"{row.algorithm_bandwidth / 1e9:.3g}", f"{row.bus_bandwidth(job.ranks) / 1e9:.3g}"]
        if peer := job.find(job.peer, row.operation, row.size):
            cells += [seconds_in_words(peer.median), seconds_in_words(peer.p95)]
            cells += [f"{peer.bus_bandwidth(job.ranks) / 1e9:.3g}", f"{peer.median / row.median:.2f}"]
        table.add_row(*cells)
        previous = row.operation
    return table


def _patterns_table(job: Job) -> Table:
    table = Table("pattern")
    for heading in ("median", "p95", *((f"{job.peer} median", "p95", "ratio") if job.peer else ())):
        table.add_column(heading, justify="right")
    for row in job.rows:
        if row.contender in (COPY_ALONE, COPY_TOGETHER):
            table.add_row(f"64 MB, {row.contender}", seconds_in_words(row.median), seconds_in_words(row.p95))
        if row.contender != OURS or row.operation not in PATTERNS:
            continue
        cells = [row.operation, seconds_in_words(row.median), seconds_in_words(row.p95)]
        if peer := job.find(job.peer, row.operation, row.size):
            cells += [seconds_in_words(peer.median), seconds_in_words(peer.p95), f"{peer.median / row.median:.2f}"]
        table.add_row(*cells)
    return table


def plot(jobs: Sequence[Job], description: dict[str, Any], path: Path) -> None:
    """One column for each operation: time of a call above, bus bandwidth below, over the size; peers dashed."""
    import matplotlib

    matplotlib.use("Agg")  # a file, never a window
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter

    operations = list(dict.fromkeys(row.operation for job in jobs for row in job.rows if row.operation not in PATTERNS))
    if not operations:
        return
    figure, axes = plt.subplots(
        2, len(operations), figsize=(3.3 * len(operations) + 0.8, 6.4), sharex=True, sharey="row", squeeze=False
    )
    copy = jobs[0].find(COPY_TOGETHER, FLOAT32, LARGE)
    colours = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    for column, operation in enumerate(operations):
        time_axis, bandwidth_axis = axes[0][column], axes[1][column]
        for number, job in enumerate(jobs):
            for contender in dict.fromkeys(row.contender for row in job.rows):
                rows = [row for row in job.rows if (row.contender, row.operation) == (contender, operation)]
                if not rows or (contender != OURS and number > 0):
                    continue  # the peer is drawn once, from the first job
                ours = contender == OURS
                style: dict[str, Any] = {
                    "label": f"horovod, {job.engine}" if ours else contender,
                    "color": colours[number] if ours else "0.45",
                    "linestyle": "-" if ours else "--",
                    "marker": "o",
                    "markersize": 3.5,
                }
                sizes = [row.size for row in rows]
                time_axis.plot(sizes, [row.median for row in rows], **style)
                bandwidth_axis.plot(sizes, [row.bus_bandwidth(job.ranks) / 1e9 for row in rows], **style)
        if copy is not None:
            bandwidth_axis.axhline(copy.algorithm_bandwidth / 1e9, color="0.7", linewidth=1, linestyle=":")
        time_axis.set(title=operation, xscale="log", yscale="log")
        bandwidth_axis.set(xlabel="size")
        sizes = sorted({row.size for job in jobs for row in job.rows if row.operation == operation})
        bandwidth_axis.set_xticks(sizes[:: max(1, len(sizes) // 4)], minor=False)
        bandwidth_axis.minorticks_off()
        bandwidth_axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: bytes_in_words(round(value))))
        time_axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: seconds_in_words(value)))
        for axis in (time_axis, bandwidth_axis):
            axis.grid(color="0.92")
            axis.set_axisbelow(True)
            axis.spines[["top", "right"]].set_visible(False)
    axes[1][0].set_ylim(bottom=0)  # only now: it ends the shared axis' growing with what is drawn
    axes[0][0].set_ylabel("time of one call, median")
    axes[1][0].set_ylabel("bus bandwidth, GB/s")
    if copy is not None:
        axes[1][-1].annotate(
            COPY_TOGETHER,
            (1, copy.algorithm_bandwidth / 1e9),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            fontsize=8,
            color="0.4",
        )
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(labels), frameon=False, bbox_to_anchor=(0.5, 0.955))
    figure.suptitle(f"Collectives between {jobs[0].ranks} ranks on one host", fontsize=13, y=0.99)
    figure.text(0.5, 0.005, machine.in_words(description), ha="center", fontsize=7.5, color="0.4")
    figure.tight_layout(rect=(0, 0.02, 1, 0.94))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def bytes_in_words(size: int) -> str:
    for unit, factor in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size} B"


def seconds_in_words(seconds: float) -> str:
    """Three digits and the unit that suits them."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
