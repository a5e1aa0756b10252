"""From the measurements of ``collectives.py`` to its tables and its picture. Nothing here measures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
LEAST_RATIO, LEAST_RATIO_FROM = 1 / 1.1, 1 << 20
"""The goal for an engine that stands on another library, and the size from which it holds."""
SHM_AHEAD_FROM = 4 << 10
"""From this size up, on one host, nothing is to be faster than shm."""
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

    @property
    def beside_its_library(self) -> bool:
        """Whether the peer is the library that the engine stands on. An MPI goes by its own name."""
        return self.peer != "" and self.engine == ("gloo" if self.peer == "gloo" else "mpi")

    @property
    def label(self) -> str:
        """The engine, and which MPI it stands on."""
        return f"mpi ({self.peer})" if self.engine == "mpi" and self.beside_its_library else self.engine

    def ratios(self) -> Iterator[tuple[Row, float]]:
        """Of each row of ours beside the peer's: the peer's median over ours."""
        for row in self.rows:
            peer = self.find(self.peer, row.operation, row.size) if row.contender == OURS else None
            if peer is not None:
                yield row, peer.median / row.median

    def find(self, contender: str, operation: str, size: int) -> Row | None:
        key = (contender, operation, size)
        return next((row for row in self.rows if (row.contender, row.operation, row.size) == key), None)


def print_engines(jobs: Sequence[Job], description: dict[str, Any]) -> None:
    """One table of all engines, by operation and size: through Horovod, and beside it the library used directly."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=60 + 30 * len(jobs))
    console.print(machine.in_words(description), highlight=False, soft_wrap=True)
    console.print(f"\n{jobs[0].ranks} ranks; median of a call; ratio: time of the library used directly over ours")
    table = Table("operation")
    for heading in ("size", *(heading for job in jobs for heading in _headings(job))):
        table.add_column(heading, justify="right")
    keys = dict.fromkeys((row.operation, row.size) for job in jobs for row in job.rows if row.operation not in PATTERNS)
    previous = ""
    for operation, size in keys:
        if previous not in ("", operation):
            table.add_section()
        previous = operation
        cells = [operation, bytes_in_words(size)]
        for job in jobs:
            row, peer = job.find(OURS, operation, size), job.find(job.peer, operation, size)
            cells.append(seconds_in_words(row.median) if row else "")
            if job.peer:
                cells.append(seconds_in_words(peer.median) if peer else "")
                cells.append(f"{peer.median / row.median:.2f}" if peer and row else "")
        table.add_row(*cells)
    console.print(table)
    for line in _verdicts(jobs):
        console.print(line, highlight=False, soft_wrap=True)
    for job in jobs:
        if _patterns_table(job).row_count:
            console.print(f"\n{job.label}", _patterns_table(job))


def _headings(job: Job) -> list[str]:
    return [job.label, "directly", "ratio"] if job.peer else [job.label]


def _verdicts(jobs: Sequence[Job]) -> Iterator[str]:
    """Where the goals are missed."""
    slow = [
        f"{job.label} {row.operation} of {bytes_in_words(row.size)}: {ratio:.2f}"
        for job in jobs
        for row, ratio in job.ratios()
        if row.size >= LEAST_RATIO_FROM and ratio < LEAST_RATIO
    ]
    yield f"Ratios below {LEAST_RATIO:.2f} from {bytes_in_words(LEAST_RATIO_FROM)} up: {'; '.join(slow) or 'none'}"
    shm = next((job for job in jobs if job.engine == "shm"), None)
    if shm is None:
        return
    ahead = [
        f"{job.label if row.contender == OURS else row.contender + ' directly'} {row.operation} of "
        f"{bytes_in_words(row.size)}: {row.median / own.median:.2f} of its time"
        for job in jobs
        for row in job.rows
        if row.size >= SHM_AHEAD_FROM
        if (own := shm.find(OURS, row.operation, row.size)) is not None and row.median < own.median
    ]
    yield f"Faster than shm from {bytes_in_words(SHM_AHEAD_FROM)} up: {'; '.join(ahead) or 'nothing'}"


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
    several = len({job.peer for job in jobs}) > 1  # each then has the colour of the engine that it is beside
    for column, operation in enumerate(operations):
        time_axis, bandwidth_axis = axes[0][column], axes[1][column]
        drawn = set[str]()
        for number, job in enumerate(jobs):
            for contender in dict.fromkeys(row.contender for row in job.rows):
                rows = [row for row in job.rows if (row.contender, row.operation) == (contender, operation)]
                if not rows or contender in drawn:
                    continue  # a peer is drawn once, from the first job that it is in
                ours = contender == OURS
                drawn |= set() if ours else {contender}
                style: dict[str, Any] = {
                    "label": f"horovod, {job.label}" if ours else contender,
                    "color": colours[number] if ours or several else "0.45",
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
