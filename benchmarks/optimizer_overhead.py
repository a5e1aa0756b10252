"""What ``DistributedOptimizer`` costs the framework's thread: microseconds for each parameter and step.

    horovodrun -np 2 python benchmarks/optimizer_overhead.py

Trains twice 500 parameters of 16 elements, so that the tensors themselves cost next to nothing, with and without the wrapper,
one step after the other, and compares the processor time of the thread that runs backward and the optimizer. What other
threads do meanwhile, and waiting, are not in it; ``benchmarks/training.py`` shows what is left of them. The same again with
``HOROVOD_CHECK=off`` shows what the ranks' comparison of gradients and parameters costs in a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from machine import describe, in_words

import horovod.torch as hvd


def microseconds(optimizer: torch.optim.Optimizer) -> float:
    """Processor time of this thread for a step."""
    (group,) = optimizer.param_groups
    started = time.thread_time()
    optimizer.zero_grad()
    torch.stack([p.sum() for p in group["params"]]).sum().backward()
    optimizer.step()
    return (time.thread_time() - started) * 1e6


def optimizer(parameters: int) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(16)) for _ in range(parameters)], lr=0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=500)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", type=Path, metavar="PATH")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds = {check: measured(options.parameters, options.steps, check) for check in ("warn", "off")}
    if hvd.rank() == 0:
        print(in_words(MACHINE[0]))
        for check, found in rounds.items():
            median, spread = statistics.median(found), f"{min(found):.2f} to {max(found):.2f}"
            print(
                f"{hvd.size()} ranks, HOROVOD_CHECK={check}: {median:.2f} us a parameter and step (five rounds: {spread})"
            )
        medians = {check: statistics.median(found) for check, found in rounds.items()}
        compared = (medians["warn"] - medians["off"]) * options.parameters
        print(f"the comparison: {compared:.1f} us a step")
        if options.json:
            record = {
                "machine": MACHINE[0],
                "ranks": hvd.size(),
                "microseconds_per_parameter": medians["warn"],
                "rounds": rounds["warn"],
                "comparison_microseconds_per_step": compared,
            }
            options.json.write_text(json.dumps(record, indent=1))


MACHINE: list[Any] = []


def measured(parameters: int, steps: int, check: str) -> list[float]:
    """Microseconds for each parameter and step, of five rounds in a generation of its own."""
    os.environ["HOROVOD_CHECK"] = check
    hvd.shutdown()
    hvd.init()
    if hvd.rank() == 0 and not MACHINE:
        MACHINE.append(describe())
    alone, wrapped = optimizer(parameters), hvd.DistributedOptimizer(optimizer(parameters))
    for _ in range(10):  # to warm up
        microseconds(alone), microseconds(wrapped)
    rounds = []
    for _ in range(5):
        differences = [microseconds(wrapped) - microseconds(alone) for _ in range(steps)]
        rounds.append(statistics.median(differences) / parameters)
    return rounds


if __name__ == "__main__":
    main()
