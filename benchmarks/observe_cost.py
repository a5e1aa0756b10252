"""What it costs that a job is watched: the flight recorder, the watch for stragglers, and timelines.

    python benchmarks/observe_cost.py [--np 2] [--seconds 60] [--json PATH]

The model is the transformer of ``workloads.py``, whose 147 tensors are many for the time of its step; PyTorch, 2 ranks.

In turns. The ranks of one job change what is on every few steps, in turns of
    off           neither the flight recorder nor the clock of the steps, from which the watch for stragglers has its numbers
    default       what is on without being asked for
    timeline      that, and a timeline of rank 0
    all ranks     that, and a timeline of all ranks
A round is a turn of each, in an order that changes from round to round. A turn's step time is the median of its steps, a
round's cost its ratio to the turn without, and the table has the median over the rounds with the interval in which it lies
with a confidence of 95 % (by the places of the sorted ratios, whatever their distribution). So slow changes of the machine,
and where a process happens to have its memory, change nothing. ``off`` twice in a round shows what is noise: *off again*.

A 1 KB allreduce is measured in the same way, in turns of some hundreds.

Directly. Noise of a step is larger than what is looked for. So each part is also timed by itself, in loops: what the recorder
adds to the life of a collective, one change of phase, and the report that each rank makes every two seconds. Multiplied by how
often a step does it, and divided by the time of a step, that is the cost that the part can have if nothing hides it. Of
timelines it is the processor time of what writes them, and what a small collective takes longer without the fast path.

With ``--json`` a record is written. If it is there already, its rounds are added to: several calls measure in portions.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine
from launching import horovodrun
from observe_cost_report import table

WORKER = Path(__file__).with_name("observe_cost_worker.py")
TIMELINES = {"one": {}, "all": {"HOROVOD_TIMELINE_ALL_RANKS": "1"}}
"""The two jobs, for whether a timeline is one of all ranks is decided in ``init()``."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long each of two jobs measures (default: 60)")
    parser.add_argument("--json", type=Path, metavar="PATH")
    options = parser.parse_args()
    record: dict[str, Any]
    if options.json is not None and options.json.exists():
        record = json.loads(options.json.read_text())
    else:
        record = {"machine": machine.describe(("torch",)), "ranks": options.np, "ratios": {}, "direct": []}
    for which, env in TIMELINES.items():
        found = run(options.np, which, options.seconds, env)
        for name, ratios in found["ratios"].items():
            record["ratios"].setdefault(name, []).extend(ratios)
        if "direct" in found:
            record["direct"].append(found["direct"])
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1))
    print("\n".join(table(record)))


def run(ranks: int, which: str, seconds: float, env: dict[str, str]) -> dict[str, Any]:
    """What one job has measured."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "found.json"
        command = horovodrun(ranks, sys.executable, str(WORKER), which, str(seconds), str(answer))
        env = {**clean, **env, "HOROVOD_TIMELINE": "DYNAMIC"}
        subprocess.run(command, env=env, check=True, timeout=600)
        found: dict[str, Any] = json.loads(answer.read_text())
    return found


if __name__ == "__main__":
    main()
