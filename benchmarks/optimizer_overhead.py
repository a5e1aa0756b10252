"""What ``DistributedOptimizer`` costs the framework's thread: microseconds for each parameter and step.

    horovodrun -np 2 python benchmarks/optimizer_overhead.py

Trains twice 500 parameters of 16 elements, so that the tensors themselves cost next to nothing, with and without the wrapper,
one step after the other, and compares the processor time of the thread that runs backward and the optimizer. What other
threads do meanwhile, and waiting, are not in it; ``benchmarks/training.py`` shows what is left of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

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
    hvd.init()
    torch.set_num_threads(1)
    machine = describe() if hvd.rank() == 0 else {}
    alone, wrapped = optimizer(options.parameters), hvd.DistributedOptimizer(optimizer(options.parameters))
    for _ in range(10):  # to warm up
        microseconds(alone), microseconds(wrapped)
    rounds = []
    for _ in range(5):
        differences = [microseconds(wrapped) - microseconds(alone) for _ in range(options.steps)]
        rounds.append(statistics.median(differences) / options.parameters)
    if hvd.rank() == 0:
        print(in_words(machine))
        median, spread = statistics.median(rounds), f"{min(rounds):.2f} to {max(rounds):.2f}"
        print(f"{hvd.size()} ranks: {median:.2f} us a parameter and step (five rounds: {spread})")
        if options.json:
            record = {"machine": machine, "ranks": hvd.size(), "microseconds_per_parameter": median, "rounds": rounds}
            options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
