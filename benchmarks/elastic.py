"""How soon training goes on after a rank was killed: elastic jobs beside torchft and torchrun.

    python benchmarks/elastic.py
    python benchmarks/elastic.py --rounds 10 --json elastic.json --plot elastic.png

Four ranks train a multilayer perceptron; in the middle of a step one of them kills itself. What counts is the time from then
until the slowest rank has completed its first step after that, in parts. The contenders take turns; the highest
rank and rank 0 are killed in turns, too.

    horovodrun        --min-np 3, hvd.DistributedOptimizer, and a state with rollback="step": the three that are left go on in
                      their processes
    horovodrun, DDP   the same with DistributedDataParallel on init_process_group("horovod")
    torchft           its DDP, optimizer wrapper, managers and lighthouse; the three that are left go on in their processes
    torchrun          --max-restarts 1: four new processes go on from a checkpoint, which rank 0 writes after each step

Contenders that are not installed are left out, and the output says so. Their time limits are as low as they bear
(``elastic_contenders.py``); the output says which.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine
from elastic_contenders import CONTENDERS, Contender


def main() -> None:
    options = parse_arguments()
    description = machine.describe()
    missing = {each.name: each.obstacle() for each in CONTENDERS if each.obstacle()}
    present = [each for each in CONTENDERS if each.name not in missing]
    seconds: dict[str, list[dict[str, float]]] = {each.name: [] for each in present}
    for number in range(options.rounds):
        victim = options.np - 1 if number % 2 == 0 else 0
        for each in present:
            seconds[each.name].append(recovery(each, options.np, victim))
    record: dict[str, Any] = {
        "machine": description,
        "load": os.getloadavg(),
        "ranks": options.np,
        "limits": {each.name: each.limits for each in present if each.limits},
        "seconds": seconds,
        "recovery": {name: sum(median_loss(found).values()) for name, found in seconds.items()},
    }
    print(machine.in_words(description))
    for each in present:
        found = seconds[each.name]
        totals, median = [sum(parts.values()) for parts in found], median_loss(found)
        print(
            f"{each.name}, {continued(each.name, options.np)}: from the kill to the first step {sum(median.values()):.2f} s "
            f"({min(totals):.2f} to {max(totals):.2f}, {len(totals)} times), of which"
        )
        for part, words in each.parts.items():
            print(f"    {median[part]:6.2f} s  {words}")
        if each.limits:
            print(f"    with {each.limits}")
    for name, why in missing.items():
        print(f"{name}: not measured: {why}")
    if options.json:
        options.json.write_text(json.dumps(record, indent=1))
    if options.plot:
        plot(record, options.plot)


def recovery(contender: Contender, ranks: int, victim: int) -> dict[str, float]:
    """Run one job in which rank ``victim`` is killed; the seconds of each part of what follows, up to the slowest rank."""
    with tempfile.TemporaryDirectory() as folder:
        contender.run(Path(folder), ranks, victim)
        killed = float((Path(folder) / "killed").read_text())
        notes = [json.loads(path.read_text()) for path in Path(folder).glob("notes.*")]
    after = [note for note in notes if note.get("step", 0.0) > killed]
    if len(after) != (ranks if contender.replaces else ranks - 1):
        sys.exit(f"{contender.name}: {len(after)} ranks have made a step after the loss")
    parts, before = {}, killed
    for part in contender.parts:
        latest = max(note[part] for note in after)
        parts[part], before = max(0.0, latest - before), max(before, latest)
    return parts


def median_loss(found: list[dict[str, float]]) -> dict[str, float]:
    """The parts, in seconds, of the loss whose time is the median: the lower of two."""
    return sorted(found, key=lambda parts: sum(parts.values()))[(len(found) - 1) // 2]


def continued(name: str, ranks: int) -> str:
    """With how many ranks, and which, a contender goes on after the loss of one."""
    replaces = any(each.replaces for each in CONTENDERS if each.name == name)
    return f"{ranks} new ranks" if replaces else f"the other {ranks - 1} ranks"


def plot(record: dict[str, Any], path: Path) -> None:
    """One bar for each contender: the loss from which it recovered in the median time, in parts."""
    import matplotlib

    matplotlib.use("Agg")  # a file, never a window
    import matplotlib.pyplot as plt

    shades = {
        "horovodrun": ["#1a4971", "#2b6cb0", "#63a0d8", "#b5d3ee"],
        "horovodrun, DDP": ["#1a4971", "#2b6cb0", "#63a0d8", "#b5d3ee"],
        "torchft": ["#8a5a2b", "#d3a878"],
        "torchrun": ["#5d6673", "#7f8a9a", "#a0aec0", "#cfd6e0"],
    }
    present = [each for each in CONTENDERS if each.name in record["seconds"]]
    figure, axes = plt.subplots(figsize=(8.0, 1.6 + 0.7 * len(present)), dpi=150)
    for place, each in enumerate(present):
        left, median = 0.0, median_loss(record["seconds"][each.name])
        for (part, words), colour in zip(each.parts.items(), shades[each.name], strict=True):
            label = f"{each.name}: {words}" if each.name != "horovodrun, DDP" else None  # as horovodrun
            axes.barh(-place, median[part], left=left, color=colour, height=0.5, label=label)
            left += median[part]
        axes.annotate(f" {left:.2f} s", (left, -place), va="center", fontsize=10)
    ranks = record["ranks"]
    names = [f"{each.name}\ngoes on with\n{continued(each.name, ranks)}" for each in present]
    axes.set_yticks([-place for place in range(len(present))], names, fontsize=9)
    axes.set_ylim(-len(present) + 0.55, 0.45)
    axes.margins(x=0.12)
    axes.set_xlabel(f"seconds from the kill of one of {ranks} ranks to the next step, in the loss of the median time")
    axes.legend(loc="upper right", frameon=False, fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, facecolor="white")
    plt.close(figure)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--np", type=int, default=4, metavar="RANKS")
    parser.add_argument("--rounds", type=int, default=6, help="how often each loses a rank (default: 6)")
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--plot", type=Path, metavar="PATH")
    options = parser.parse_args()
    if options.np < 2 or options.rounds < 1:
        parser.error("--np must be at least 2, and --rounds at least 1")
    return options


if __name__ == "__main__":
    main()
