"""How soon training goes on after a rank was killed: an elastic job beside torchrun, which starts all processes anew.

    python benchmarks/elastic.py
    python benchmarks/elastic.py --rounds 10 --json elastic.json --plot elastic.png

Four ranks train a multilayer perceptron; in the middle of a step one of them kills itself. What counts is the time from then
until the slowest rank has completed its first step after that, in parts. The contenders take turns; the highest
rank and rank 0 are killed in turns, too.

    horovodrun   --min-np 3, and a state with rollback="step": the three that are left go on in their processes
    torchrun     --max-restarts 1: four new processes go on from a checkpoint, which rank 0 writes after each step
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine

WORKER = Path(__file__).with_name("elastic_worker.py")
HOROVODRUN, TORCHRUN = "horovodrun", "torchrun"
PARTS = {
    HOROVODRUN: {
        "noticed": "the loss is noticed, all tensors are free",
        "met": "the others have met and are connected",
        "synchronised": "all have one state",
        "step": "first step",
    },
    TORCHRUN: {
        "started": "the loss is noticed, all are ended and new ones started",
        "imported": "they import PyTorch",
        "met": "they have met, model and checkpoint are loaded",
        "step": "first step",
    },
}
"""What a worker notes, and what it has done since the note before."""


def main() -> None:
    options = parse_arguments()
    description = machine.describe()
    seconds: dict[str, list[dict[str, float]]] = {HOROVODRUN: [], TORCHRUN: []}
    for number in range(options.rounds):
        victim = options.np - 1 if number % 2 == 0 else 0
        for name, found in seconds.items():
            found.append(recovery(name, options.np, victim))
    record: dict[str, Any] = {
        "machine": description,
        "load": os.getloadavg(),
        "ranks": options.np,
        "seconds": seconds,
        "recovery": {
            name: statistics.median(sum(parts.values()) for parts in found) for name, found in seconds.items()
        },
    }
    print(machine.in_words(description))
    for name, found in seconds.items():
        totals = [sum(parts.values()) for parts in found]
        print(
            f"{name}: from the kill to the first step {statistics.median(totals):.2f} s ({min(totals):.2f} to "
            f"{max(totals):.2f}, {len(totals)} times), of which"
        )
        for part, words in PARTS[name].items():
            print(f"    {statistics.median(each[part] for each in found):6.2f} s  {words}")
    if options.json:
        options.json.write_text(json.dumps(record, indent=1))
    if options.plot:
        plot(record, options.plot)


def recovery(name: str, ranks: int, victim: int) -> dict[str, float]:
    """Run one job in which rank ``victim`` is killed; the seconds of each part of what follows, up to the slowest rank."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = {
            HOROVODRUN: [
                "horovod.runner.launch",
                "-H",
                f"localhost:{ranks}",
                "--min-np",
                str(ranks - 1),
                sys.executable,
            ],
            TORCHRUN: ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=1"],
        }[name]
        done = subprocess.run(
            [sys.executable, "-m", *launcher, str(WORKER), name, folder, str(victim)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        if done.returncode:
            sys.exit(f"{name} failed with exit code {done.returncode}:\n{done.stderr}")
        killed = float((Path(folder) / "killed").read_text())
        notes = [json.loads(path.read_text()) for path in Path(folder).glob("notes.*")]
    after = [note for note in notes if note.get("step", 0.0) > killed]
    if len(after) != (ranks - 1 if name == HOROVODRUN else ranks):
        sys.exit(f"{name}: {len(after)} ranks have made a step after the loss")
    parts, before = {}, killed
    for part in PARTS[name]:
        latest = max(note[part] for note in after)
        parts[part], before = max(0.0, latest - before), max(before, latest)
    return parts


def plot(record: dict[str, Any], path: Path) -> None:
    """One bar for each contender, of the medians of its parts."""
    import matplotlib

    matplotlib.use("Agg")  # a file, never a window
    import matplotlib.pyplot as plt

    colours = {
        HOROVODRUN: ["#1a4971", "#2b6cb0", "#63a0d8", "#b5d3ee"],
        TORCHRUN: ["#5d6673", "#7f8a9a", "#a0aec0", "#cfd6e0"],
    }
    figure, axes = plt.subplots(figsize=(8.0, 3.0), dpi=150)
    for place, (name, parts) in enumerate(PARTS.items()):
        left = 0.0
        for (part, words), colour in zip(parts.items(), colours[name], strict=True):
            width = statistics.median(each[part] for each in record["seconds"][name])
            axes.barh(-place, width, left=left, color=colour, height=0.5, label=f"{name}: {words}")
            left += width
        axes.annotate(f" {left:.2f} s", (left, -place), va="center", fontsize=10)
    axes.set_yticks([0, -1], list(PARTS))
    axes.set_ylim(-1.45, 0.45)
    axes.margins(x=0.12)
    axes.set_xlabel(f"seconds from the kill of one of {record['ranks']} ranks, medians of the parts")
    axes.legend(loc="upper right", frameon=False, fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
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
