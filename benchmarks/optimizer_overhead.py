"""What ``DistributedOptimizer`` costs the framework's thread: microseconds for each parameter and step.

    horovodrun -np 2 python benchmarks/optimizer_overhead.py

Trains twice 500 parameters of 16 elements, so that the tensors themselves cost next to nothing, with and without the wrapper,
one step after the other, and compares the processor time of the thread that runs backward and the optimizer. In it is the
last collective of a pass, which this thread carries out itself while it waits, polling included. What other threads do
meanwhile, and sleeping, are not in it; ``benchmarks/training.py`` shows what is left of them. The same with
``HOROVOD_CHECK=off``, in turns, shows what the ranks' comparison of gradients and parameters costs. It looks at them in one of
eight steps, so times are those of eight steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
from machine import describe, in_words

import horovod.torch as hvd

STEPS = 8
"""The comparison does the same in each group of so many steps."""
CHECKS = ("warn", "off")
"""The values of ``HOROVOD_CHECK``, the default first."""


def microseconds(optimizer: torch.optim.Optimizer) -> float:
    """Processor time of this thread for a step, over several steps."""
    (group,) = optimizer.param_groups
    started = time.thread_time()
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.stack([p.sum() for p in group["params"]]).sum().backward()
        optimizer.step()
    return (time.thread_time() - started) * 1e6 / STEPS


def optimizer(parameters: int) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(16)) for _ in range(parameters)], lr=0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=500)
    parser.add_argument("--groups", type=int, default=10, help=f"of {STEPS} steps, in each of five rounds")
    parser.add_argument("--json", type=Path, metavar="PATH")
    options = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    machine = describe() if hvd.rank() == 0 else {}
    hvd.barrier()  # the others sleep while rank 0 looks how busy the machine is
    rounds: dict[str, list[float]] = {check: [] for check in CHECKS}
    for _ in range(5):
        for check in CHECKS:
            rounds[check].append(measured(options.parameters, options.groups, check))
    if hvd.rank() == 0:
        print(in_words(machine))
        for check, found in rounds.items():
            each = [time / options.parameters for time in found]
            print(f"{hvd.size()} ranks, HOROVOD_CHECK={check}: {_five(each, 2)} us a parameter and step")
        compared = [warn - off for warn, off in zip(*rounds.values(), strict=True)]
        print(f"the comparison alone: {_five(compared, 0)} us a step of {options.parameters} parameters")
        if options.json:
            record = {
                "machine": machine,
                "ranks": hvd.size(),
                "microseconds_per_parameter": statistics.median(rounds["warn"]) / options.parameters,
                "rounds": [time / options.parameters for time in rounds["warn"]],
                "comparison_microseconds_per_step": statistics.median(compared),
                "comparison_rounds": compared,
            }
            options.json.write_text(json.dumps(record, indent=1))


def _five(rounds: list[float], digits: int) -> str:
    """The median of rounds, and their range."""
    low, median, high = (f"{found:.{digits}f}" for found in (min(rounds), statistics.median(rounds), max(rounds)))
    return f"{median} ({low} to {high})"


def measured(parameters: int, groups: int, check: str) -> float:
    """Microseconds of a step that the wrapper adds, in a generation of its own."""
    os.environ["HOROVOD_CHECK"] = check
    hvd.shutdown()
    hvd.init()
    alone, wrapped = optimizer(parameters), hvd.DistributedOptimizer(optimizer(parameters))
    microseconds(alone), microseconds(wrapped)  # to warm up
    return statistics.median(microseconds(wrapped) - microseconds(alone) for _ in range(groups))


if __name__ == "__main__":
    main()
