"""Where the time of a training step goes: a flame graph of one rank, made with py-spy.

    horovodrun -np 2 python benchmarks/profile_step.py --model mlp --output step.svg

Rank 0 has itself sampled for ``--seconds`` once its steps are steady, all threads beside one another. Only moments in which
a thread runs are counted, unless ``--idle`` is given; then waiting is in the picture too. ``--format speedscope`` writes
for https://www.speedscope.app instead.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from workloads_torch import WORKLOADS

import horovod.torch as hvd


def main() -> None:
    options = parse_arguments()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    workload = WORKLOADS[options.model]()
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=1e-3, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=workload.model.named_parameters())

    def step() -> None:
        optimizer.zero_grad()
        workload.loss(workload.model).backward()
        optimizer.step()

    for _ in range(5):
        step()
    sampler = start_sampling(options) if hvd.rank() == 0 else None
    going_on = torch.ones(1)
    deadline = time.monotonic() + options.seconds + 60
    while going_on.item():
        for _ in range(10):
            step()
        ended = sampler is not None and (sampler.poll() is not None or time.monotonic() > deadline)
        going_on = hvd.allreduce(torch.tensor(0.0 if ended else 1.0), op=hvd.Min, name="going_on")
    if sampler is not None and sampler.wait(timeout=10) != 0:
        sys.exit(f"py-spy failed with exit code {sampler.returncode}; sampling a process may need more rights")


def start_sampling(options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Have py-spy look at this process."""
    command = ["py-spy", "record", "--threads", "--rate", "500", "--pid", str(os.getpid())]
    command += ["--duration", str(options.seconds), "--format", options.format, "--output", str(options.output)]
    command += ["--idle"] if options.idle else []
    try:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL)
    except FileNotFoundError:
        sys.exit("py-spy is not installed: pip install py-spy")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", choices=list(WORKLOADS), default="mlp")
    parser.add_argument("--output", type=Path, default=Path("step.svg"), metavar="PATH")
    parser.add_argument("--format", choices=["flamegraph", "speedscope", "raw"], default="flamegraph")
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--idle", action="store_true", help="count threads that wait, too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
