"""How close autotuning comes, from deliberately bad settings, to the best that is set by hand.

    python benchmarks/autotune.py [--np 2] [--steps 4] [--rounds 10] [--json PATH]

The model is the communication-bound MLP of ``workloads.py``, in PyTorch.

1. A short job leaves a file of an unfinished search, whose settings are then replaced by ``BAD``: a search goes on from them.
2. A job tunes, from there, until it is over.
3. One job compares settings set by hand, what was chosen, and what was bad: in each of ``--rounds`` rounds it calls
   ``hvd.init()`` with each in turn and trains for a second or two, so they are compared within the same half minute. The speed
   of each is the median over the rounds of steps a second. Ratios are taken within each round.

With ``--json`` a record is written. If it is there already, the program goes on from it: it does not tune again, and adds
rounds. ``--retune`` tunes again; what was measured of settings set by hand stays. A choice that is one of these is not
measured twice.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import machine
from launching import horovodrun

WORKER = Path(__file__).with_name("autotune_worker.py")
UNLIMITED = 2**63 - 1
BAD = {"fusion_threshold": 4096, "bucket_bytes": 64 << 10, "engine": "tcp", "shm_direct": "never"}
BY_HAND = [
    {"fusion_threshold": 128 << 20, "bucket_bytes": bucket, "engine": "", "shm_direct": direct}
    for bucket, direct in product((4 << 20, 16 << 20, UNLIMITED), ("auto", "always", "never"))
]
"""The default threshold everywhere: with large buckets it does not matter here."""
CASES = "AUTOTUNE_CASES"
"""The variable that gives the worker the environments to compare."""
CHOSEN = "chosen"
"""What the record calls the choice, where it is none of these."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE (default: 4)")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--retune", action="store_true", help="tune again, though the record has a choice")
    options = parser.parse_args()
    before = json.loads(options.json.read_text()) if options.json is not None and options.json.exists() else None
    if before is not None and not options.retune:
        record = before
    else:
        description = machine.describe(("torch",))
        with tempfile.TemporaryDirectory() as folder:
            chosen, said = tune(Path(folder), options)
        speeds = {} if before is None else {name: found for name, found in before["speeds"].items() if name != CHOSEN}
        record = {"machine": description, "ranks": options.np, "chosen": chosen, "said": said, "speeds": speeds}
        keep(record, options.json)
    cases = {"bad": BAD, **{shown(each): each for each in BY_HAND}}
    if shown(record["chosen"]) not in cases:
        cases[CHOSEN] = record["chosen"]
    speeds = record["speeds"]
    if len({len(speeds.get(name, ())) for name in cases}) > 1:
        speeds.clear()  # rounds must have all of them
    if options.rounds:
        variables = json.dumps({name: environment(settings) for name, settings in cases.items()})
        output = run(options.np, {CASES: variables}, "compare", options.rounds)
        (line,) = re.findall(r"\{.*\}", output)
        for name, found in json.loads(line).items():
            speeds.setdefault(name, []).extend(found)
        keep(record, options.json)
    if speeds:
        for name, speed, ratio in judged(record):
            print(f"{name:45} {speed:7.2f} steps/s   {ratio:6.1%} of the best set by hand")
    print(f"chosen: {shown(record['chosen'])}")


def keep(record: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(record, indent=1))


def judged(record: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Of each case its name, its median speed, and the median over the rounds of its share of the best set by hand."""
    speeds = record["speeds"]
    if CHOSEN not in speeds:
        speeds = {"bad": speeds["bad"], CHOSEN: speeds[shown(record["chosen"])], **speeds}
    best = max((shown(each) for each in BY_HAND), key=lambda name: median(speeds[name]))
    return [
        (name, median(found), median(mine / other for mine, other in zip(found, speeds[best], strict=True)))
        for name, found in speeds.items()
    ]


def tune(folder: Path, options: argparse.Namespace) -> tuple[dict[str, int | str], str]:
    """What autotuning chooses when it begins with ``BAD``, and the line in which it says so."""
    file = folder / "choice.json"
    env = {
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_AUTOTUNE_FILE": str(file),
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": str(options.steps),
    }
    run(options.np, env, "tune", 18 * options.steps)
    content = json.loads(file.read_text())
    assert not content["finished"]
    content["settings"].update(BAD)
    file.write_text(json.dumps(content))
    output = run(options.np, env, "tune", 0)
    content = json.loads(file.read_text())
    assert content["finished"]
    (said,) = re.findall(r"autotuning is over.*", output)
    print(said, flush=True)
    return dict(content["settings"]), said.replace(str(folder), "FOLDER")


def environment(settings: dict[str, int | str]) -> dict[str, str]:
    """The variables that set these settings by hand."""
    env = {
        "HOROVOD_FUSION_THRESHOLD": str(settings["fusion_threshold"]),
        "HOROVOD_SHM_DIRECT": str(settings["shm_direct"]),
    }
    if settings["bucket_bytes"]:
        env["HOROVOD_BUCKET_BYTES"] = str(settings["bucket_bytes"])
    if settings["engine"]:
        env["HOROVOD_CPU_OPERATIONS"] = str(settings["engine"])
    return env


def shown(settings: dict[str, int | str]) -> str:
    bucket = int(settings["bucket_bytes"])
    size = "one bucket" if bucket == UNLIMITED else f"buckets {bucket / 2**20:g} MiB"
    return f"{size}, batches {int(settings['fusion_threshold']) / 2**20:g} MiB, reads {settings['shm_direct']}"


def run(ranks: int, env: dict[str, str], mode: str, number: int) -> str:
    """What one job of ``autotune_worker.py`` prints."""
    command = horovodrun(ranks, sys.executable, WORKER, mode, str(number))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    done = subprocess.run(
        command, env={**clean, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1800
    )
    if done.returncode:
        sys.exit(done.stdout)
    return done.stdout


if __name__ == "__main__":
    main()
