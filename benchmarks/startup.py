"""How long a job takes to start and to end, beyond what Python and PyTorch need anyway.

    python benchmarks/startup.py
    python benchmarks/startup.py --peer torchrun --json startup.json

What is measured
    import alone    as many processes as ranks, at once, that import PyTorch and end: what nobody can save
    horovodrun      the same processes as a job: ``hvd.init()``, one allreduce, the end
    torchrun        the same with ``torch.distributed`` on Gloo (``--peer torchrun``)
    init            from the call of ``hvd.init()`` to the result of the first allreduce, on the rank that comes last: the
                    others wait for it

The first three are wall-clock seconds from starting the command to its end, taken in turns; the overhead of a launcher is
the median over the rounds of its time less that of the import alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import machine
from launching import horovodrun

ALONE = "import alone"
HOROVODRUN = "horovodrun"
TORCHRUN = "torchrun"

IMPORT = "import torch"
HOROVOD_JOB = """
import sys, time, torch, horovod.torch as hvd
started = time.perf_counter()
hvd.init()
hvd.allreduce(torch.ones(1), name="first")
with open(f"{sys.argv[1]}/{hvd.rank()}", "w") as file:
    file.write(str(time.perf_counter() - started))
"""
TORCH_JOB = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


def main() -> None:
    options = parse_arguments()
    description = machine.describe()
    contenders = [ALONE, HOROVODRUN, *([TORCHRUN] if options.peer else [])]
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    inits: list[float] = []
    for number in range(options.rounds + 1):
        for name in contenders:
            taken, init = run(name, options.np)
            if number:  # the first round fills the page cache
                seconds[name].append(taken)
                inits += init
    record = {
        "machine": description,
        "ranks": options.np,
        "seconds": seconds,
        "init_to_first_allreduce": statistics.median(inits),
        "overhead": {
            name: statistics.median(a - b for a, b in zip(seconds[name], seconds[ALONE], strict=True))
            for name in contenders[1:]
        },
    }
    print(machine.in_words(description))
    for name in contenders:
        beyond = "" if name == ALONE else f", {record['overhead'][name]:.2f} s beyond the import alone"
        print(f"{name + ':':14} {statistics.median(seconds[name]):.2f} s{beyond}")
    print(f"{'init:':14} {1e3 * statistics.median(inits):.0f} ms to the result of the first allreduce")
    if options.json:
        options.json.write_text(json.dumps(record, indent=1))


def run(name: str, ranks: int) -> tuple[float, list[float]]:
    """Run one job to its end: the seconds it took, and those from ``hvd.init()`` to the first result."""
    python = [sys.executable, "-c"]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "job.py"
        script.write_text(TORCH_JOB)
        commands = {
            ALONE: [[*python, IMPORT]] * ranks,
            HOROVODRUN: [horovodrun(ranks, *python, HOROVOD_JOB, folder)],
            TORCHRUN: [
                [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--standalone",
                    f"--nproc-per-node={ranks}",
                    str(script),
                ]
            ],
        }[name]
        started = time.perf_counter()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        processes = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) for command in commands]
        for process in processes:
            _, errors = process.communicate(timeout=120)
            if process.returncode != 0:
                sys.exit(f"{name} failed with exit code {process.returncode}:\n{errors.decode()}")
        taken = time.perf_counter() - started
        inits = [float(path.read_text()) for path in Path(folder).iterdir() if path != script]
    return taken, [min(inits)] if inits else []


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--np", type=int, default=2, metavar="RANKS")
    parser.add_argument("--peer", choices=[TORCHRUN], help="measure this launcher in the same run")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is started (default: 5)")
    parser.add_argument("--json", type=Path, metavar="PATH")
    options = parser.parse_args()
    if min(options.np, options.rounds) < 1:
        parser.error("--np and --rounds must be at least 1")
    return options


if __name__ == "__main__":
    main()
