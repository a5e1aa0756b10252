"""One host of ``slow_links.py``: trains to a validation loss, or for some steps, and times them. Prints one line of JSON."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from slow_links_contenders import CONTENDERS, rank
from slow_links_tasks import TASKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--contender", choices=list(CONTENDERS), required=True)
    parser.add_argument("--task", choices=list(TASKS), required=True)
    parser.add_argument("--mnist", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="that are timed, or at most made to the target")
    parser.add_argument("--warmup", type=int, default=0)
    parser.add_argument("--target", type=float, help="train until the validation loss is at most this")
    parser.add_argument("--look", type=int, default=10, help="steps between two looks at the validation loss")
    options = parser.parse_args()
    torch.set_num_threads(1)
    contender, task = CONTENDERS[options.contender](), TASKS[options.task](options.mnist)
    contender.begin()
    torch.manual_seed(options.seed)
    model = task.make()
    wrapped, optimizer, after = contender.make(model, task.lr)
    generator = torch.Generator().manual_seed(1000 * options.seed + rank())

    def step() -> None:
        inputs, targets = task.batch(generator)
        optimizer.zero_grad()
        task.loss(wrapped, inputs, targets).backward()
        optimizer.step()
        after()

    def validation() -> float:
        """The loss of the average of the hosts' models."""
        average = {name: each.detach().clone() for name, each in model.named_parameters()}
        contender.average(list(average.values()))
        with torch.no_grad():
            found = torch.func.functional_call(model, average, (task.validation[0],))
            return float(torch.nn.functional.cross_entropy(found.flatten(0, -2), task.validation[1].flatten()))

    losses: list[float] = []
    for _ in range(options.warmup):
        step()
    contender.barrier()
    began, used = time.perf_counter(), time.process_time()
    made = 0
    looking = 0.0
    while made < options.steps:
        step()
        made += 1
        if options.target is not None and made % options.look == 0:
            paused = time.perf_counter()
            losses.append(validation())
            looking += time.perf_counter() - paused
            if losses[-1] <= options.target:  # the same on all ranks: they have the same average
                break
    contender.barrier()
    seconds = time.perf_counter() - began - looking
    processor = time.process_time() - used
    contender.end()
    elements = sum(each.numel() for each in model.parameters())
    print(
        json.dumps(
            {"steps": made, "seconds": seconds, "processor": processor, "losses": losses, "parameters": elements}
        )
    )


if __name__ == "__main__":
    main()
