"""What the benchmarks measured, held against the goals; and against an earlier record, to see what got slower.

    python benchmarks/goals.py benchmarks/results                                        # the table
    python benchmarks/goals.py benchmarks/results --record benchmarks/baseline.json      # keep the ratios
    python benchmarks/goals.py benchmarks/results --check benchmarks/baseline.json       # exit 1 if something got slower

It reads the JSON files that the other programs wrote into that folder; what was not measured is left out. Times differ from
machine to machine and from hour to hour, so only *ratios* are kept and compared: ours to something that was measured beside
it in the same run (a peer, a copy of memory, a single rank). Above 1, ours is better.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import collectives_report as collectives
import machine
from collectives_report import Job, Row
from rich.console import Console
from rich.table import Table
from training_arrangements import ALONE, DDP, DDP_VIEWS, HVD, ONE_RANK, SIDE_BY_SIDE

TOLERANCE = 0.2
"""A ratio that fell by less is noise: two runs in a row differ by so much on a machine that others share."""

MODELS = {"cnn": 0.98, "transformer": 0.96, "mlp": 0.87}


@dataclass
class Figure:
    """One measured number.

    Attributes:
        goal, met: the goal in words, and whether it was reached; "" and None for what is only compared.
        ratio: ours to ``beside``, above 1 when ours is better; None where nothing was beside it.
    """

    name: str
    value: str
    goal: str = ""
    met: bool | None = None
    ratio: float | None = None
    beside: str = ""


def main() -> None:
    options = parse_arguments()
    found = list(figures(options.results))
    if not found:
        sys.exit(f"nothing has been measured in {options.results}: make bench")
    print_table(found)
    ratios = {f"{each.name} | {each.beside.split(' (')[0]}": each.ratio for each in found if each.ratio is not None}
    if options.record:
        options.record.write_text(json.dumps(ratios, indent=1) + "\n")
    if options.check:
        sys.exit(compare(json.loads(options.check.read_text()), ratios))


def figures(results: Path) -> Iterator[Figure]:
    """Everything the folder has something to say about."""
    for path in sorted(results.glob("collectives*.json")):
        for record in load(path)["jobs"]:
            yield from of_collectives(Job.from_dict(record))
    if (path := results / "training.json").exists():
        for model in load(path)["models"]:
            yield from of_training(model)
    if (path := results / "startup.json").exists():
        yield from of_startup(load(path))
    if (path := results / "optimizer_overhead.json").exists():
        record = load(path)
        each, compared = record["microseconds_per_parameter"], record["comparison_microseconds_per_step"]
        yield Figure("DistributedOptimizer, per parameter and step", f"{each:.2f} us", "5 us", each <= 5)
        yield Figure("the ranks' comparison, per step", f"{compared:.0f} us", "20 us", compared <= 20)


def of_collectives(job: Job) -> Iterator[Figure]:
    crowd = f"{job.ranks} ranks, " if job.ranks > 2 else ""
    crowd += f"{job.engine}, " if job.engine != "shm" else ""
    goals = (
        {collectives.ONE_SMALL: 120e-6, collectives.MANY_SMALL: 5e-3, collectives.RESNET: 18e-3} if not crowd else {}
    )
    for row in job.rows:
        if row.contender != collectives.OURS:
            continue
        peer = job.find(job.peer, row.operation, row.size)
        ratio = peer.median / row.median if peer else None
        for scale in (collectives.COPY_ALONE, collectives.COPY_TOGETHER):
            if (copy := job.find(scale, row.operation, row.size)) is not None:
                yield share(f"{crowd}allreduce of 64 MB in place", row, copy, None if crowd else 0.65, scale)
        whole = job.find(collectives.OURS, collectives.FLOAT32, row.size)
        if row.operation in collectives.HALVES and whole is not None:
            yield share(f"{crowd}allreduce of {row.operation}", row, whole, None if crowd else 0.7, "float32")
        if row.operation in collectives.PATTERNS and peer:
            goal = goals.get(row.operation)
            yield Figure(
                crowd + row.operation,
                collectives.seconds_in_words(row.median),
                collectives.seconds_in_words(goal) if goal else "",
                row.median <= goal if goal else None,
                ratio,
                job.peer,
            )
    if job.beside_its_library:
        least, start = collectives.LEAST_RATIO, collectives.LEAST_RATIO_FROM
        large = [
            (ratio, row)
            for row, ratio in job.ratios()
            if row.size >= start and row.operation not in collectives.PATTERNS
        ]
        for operation in dict.fromkeys(row.operation for _, row in large):
            ratio, row = min((each for each in large if each[1].operation == operation), key=lambda each: each[0])
            size, median = collectives.bytes_in_words(row.size), collectives.seconds_in_words(row.median)
            name = f"{crowd}{operation} of {collectives.bytes_in_words(start)} and more, the worst"
            yield Figure(
                name, f"{median} for {size}", f"{least:.2f} of it", ratio >= least, ratio, f"{job.peer} directly"
            )
    if job.idle is not None:
        yield Figure(f"{crowd}idle", f"{job.idle:.3f} % of a core", "0.2 %", job.idle <= 0.2)


def share(name: str, row: Row, scale: Row, goal: float | None, beside: str) -> Figure:
    """A bandwidth, as a share of another in the same run."""
    ratio = scale.median / row.median
    return Figure(
        name,
        f"{row.algorithm_bandwidth / 1e9:.1f} GB/s",
        "" if goal is None else f"{goal:g} of it",
        None if goal is None else ratio >= goal,
        ratio,
        beside,
    )


def of_training(model: dict[str, Any]) -> Iterator[Figure]:
    name, efficiency = model["model"], {ALONE: 1.0, **model["efficiency"]}
    goal = MODELS.get(name)
    for beside in (ALONE, SIDE_BY_SIDE, DDP, DDP_VIEWS):
        if beside in efficiency:
            yield Figure(
                f"training efficiency, {name}",
                f"{efficiency[HVD]:.1%}",
                f"{goal:.0%}" if goal else "",
                efficiency[HVD] >= goal if goal else None,
                efficiency[HVD] / efficiency[beside],
                f"{beside} ({efficiency[beside]:.1%})",
            )
    cost = 1 / efficiency[ONE_RANK] - 1
    yield Figure(f"one rank, {name}", f"{cost:+.2%}", "0.5 %", cost <= 0.005, efficiency[ONE_RANK], ALONE)


def of_startup(record: dict[str, Any]) -> Iterator[Figure]:
    init, overhead = record["init_to_first_allreduce"], record["overhead"]
    yield Figure("hvd.init() to the first result", f"{1e3 * init:.0f} ms", "200 ms", init <= 0.2)
    ours = overhead["horovodrun"]
    ratio = beside = None
    if "torchrun" in overhead:
        seconds = record["seconds"]
        beside = "torchrun"
        ratio = sum(seconds["torchrun"]) / sum(seconds["horovodrun"])
    yield Figure("horovodrun, beyond the import", f"{ours:.2f} s", "0.4 s", ours <= 0.4, ratio, beside or "")


def print_table(found: list[Figure]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=130)
    table = Table("figure", "beside")
    for heading in ("measured", "goal", "", "ratio"):
        table.add_column(heading, justify="right")
    for each in found:
        outcome = "" if each.met is None else "reached" if each.met else "[bold]missed[/]"
        ratio = "" if each.ratio is None else f"{each.ratio:.2f}"
        table.add_row(each.name, each.beside, each.value, each.goal, outcome, ratio)
    console.print(machine.in_words(machine.describe()), highlight=False, soft_wrap=True)
    console.print(table)


def compare(before: dict[str, float], now: dict[str, float]) -> int:
    """Say what got slower by more than noise; the exit code."""
    slower = {
        name: now[name] / old for name, old in before.items() if name in now and now[name] < (1 - TOLERANCE) * old
    }
    for name in sorted(set(before) - set(now)):
        print(f"not measured this time: {name}")
    for name, share in slower.items():
        print(f"SLOWER: {name}: ratio {now[name]:.2f}, was {before[name]:.2f} ({share - 1:+.0%})")
    print(f"{len(before.keys() & now.keys())} ratios compared, {len(slower)} fell by more than {TOLERANCE:.0%}")
    return 1 if slower else 0


def load(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("results", type=Path, help="the folder with the JSON files of the other programs")
    parser.add_argument("--record", type=Path, metavar="PATH", help="write the ratios there")
    parser.add_argument("--check", type=Path, metavar="PATH", help="compare with the ratios there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
