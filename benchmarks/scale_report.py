"""From the record of ``scale.py`` to its table and its picture. Nothing here measures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import machine

Record = dict[str, Any]

HEAD = (
    "| ranks | of a host | what | ms of one core | a second | bytes a rank and step, to and from rank 0 | "
    "connections of rank 0 | rank 0 grows by |"
)
RULE = "| ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |"


def table(record: Record) -> Iterator[str]:
    """One row a measurement."""
    yield HEAD
    yield RULE
    yield from map(in_a_row, record["measured"])


def liveness_table(record: Record) -> Iterator[str]:
    """One row a failure."""
    yield "| ranks | of a host | who ends | all are told after, ms | connections of rank 0 | of a relay, at most |"
    yield "| ---: | ---: | --- | ---: | ---: | ---: |"
    for found in record["measured"]:
        who = "a relay" if found["what"] == "failure of a relay" else "another rank"
        flat = found["local_ranks"] >= found["ranks"]
        cells = [format(found["ranks"], ","), "all" if flat else found["local_ranks"], who]
        cells += [f"{found['seconds'] * 1000:.0f}", found["connections"], "" if flat else found["relay_connections"]]
        yield f"| {' | '.join(map(str, cells))} |"


def in_a_row(found: Record) -> str:
    cells = [f"{found['seconds'] * 1000:.0f} (wall clock)", "", "", "", ""] if "seconds" in found else [""] * 5
    if "milliseconds" in found:
        each = found["milliseconds"]
        bytes_ = f"{found['bytes_to']:,.0f} + {found['bytes_from']:,.0f}"
        connections, grown = f"{found['connections']:,}", f"{found['grown_mib']:.0f} MiB"
        cells = [f"{each:.1f}", f"{1000 / each:.1f}", bytes_, connections, grown]
    elif "connections" in found:
        cells[3] = f"{found['connections']:,}"
    elif found["what"] == "init":
        cells[2] = f"{found['bytes_from']:,.0f}"
    local = "all" if found["local_ranks"] >= found["ranks"] else str(found["local_ranks"])
    return f"| {' | '.join([format(found['ranks'], ','), local, found['what'], *cells])} |"


def plot(record: Record, path: Path) -> None:
    """Rank 0's time for a step of cached gradients over the number of ranks, on hosts and on one."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves: dict[str, list[tuple[int, float]]] = {}
    for found in record["measured"]:
        if found["what"] == "cached":
            alone = found["local_ranks"] >= found["ranks"]
            name = "each rank connected with rank 0" if alone else f"{found['local_ranks']} ranks a host, with relays"
            curves.setdefault(name, []).append((found["ranks"], found["milliseconds"]))
    figure, axis = plt.subplots(figsize=(6.4, 4.2))
    for name, points in curves.items():
        axis.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    sizes = sorted({size for points in curves.values() for size, _ in points})
    axis.set_xticks(sizes, [format(size, ",") for size in sizes])
    axis.set_xlabel("ranks")
    axis.set_ylabel("milliseconds of rank 0's core")
    axis.set_title("Deciding ResNet-50's 161 cached gradients", fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.text(0.5, 0.01, machine.in_words(record["machine"]), ha="center", fontsize=6.5, color="0.4")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=150)
    plt.close(figure)
