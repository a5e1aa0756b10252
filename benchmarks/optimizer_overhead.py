"""What ``DistributedOptimizer`` costs the framework's thread: microseconds for each parameter and step.

    horovodrun -np 2 python benchmarks/optimizer_overhead.py

Trains 500 parameters of 16 elements, so that the tensors themselves cost next to nothing, with and without the wrapper, and
compares the processor time of the thread that runs backward and the optimizer. What other threads do meanwhile, and waiting,
are not in it; ``benchmarks/training.py`` shows what is left of them.
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


def microseconds(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], steps: int) -> float:
    """Processor time of this thread for a step, the median of ``steps`` after some to warm up."""
    taken = []
    for _ in range(steps + 10):
        started = time.thread_time()
        optimizer.zero_grad()
        torch.stack([p.sum() for p in parameters]).sum().backward()
        optimizer.step()
        taken.append(time.thread_time() - started)
    return statistics.median(taken[10:]) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=500)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", type=Path, metavar="PATH")
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    machine = describe() if hvd.rank() == 0 else {}
    parameters = [torch.nn.Parameter(torch.zeros(16)) for _ in range(options.parameters)]
    rounds = []
    for _ in range(5):
        alone = microseconds(torch.optim.SGD(parameters, lr=0.1), parameters, options.steps)
        wrapped = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1))
        rounds.append((microseconds(wrapped, parameters, options.steps) - alone) / options.parameters)
        del wrapped
        hvd.barrier()
    if hvd.rank() == 0:
        print(in_words(machine))
        median, spread = statistics.median(rounds), f"{min(rounds):.2f} to {max(rounds):.2f}"
        print(f"{hvd.size()} ranks: {median:.2f} us a parameter and step (five rounds: {spread})")
        if options.json:
            record = {"machine": machine, "ranks": hvd.size(), "microseconds_per_parameter": median, "rounds": rounds}
            options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
