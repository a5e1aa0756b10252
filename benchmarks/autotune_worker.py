"""One rank of ``autotune.py``: trains the MLP and says how fast.

    autotune_worker.py tune STEPS           until autotuning is over, or for so many steps if not 0
    autotune_worker.py compare ROUNDS       with the settings of each of several environments in turn: ``AUTOTUNE_CASES``
                                            has them as JSON, by name the variables

In ``compare`` each turn begins with ``hvd.init()`` in its environment, so turns of a second or two stand side by side and the
drift of the machine is the same for all.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import median

import torch
from autotune import CASES
from workloads_torch import WORKLOADS, Workload

import horovod.torch as hvd
from horovod.core.lifecycle.context import running
from horovod.core.worker.coordinator import Coordinator

WARM = 4
STEPS = 8
MOST = 20_000


def tuned() -> bool:
    """Whether autotuning is over. The same on all ranks."""
    role = running().workers[0].role
    over = isinstance(role, Coordinator) and role.tuner is None
    return bool(hvd.broadcast(torch.tensor(over), 0, name="over").item())


@contextmanager
def environment(extra: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(extra)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def train(workload: Workload) -> Iterator[float]:
    """Train with a new optimizer, which takes the parameters from an earlier one; the seconds of each step."""
    model = workload.model
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    while True:
        began = time.perf_counter()
        optimizer.zero_grad()
        workload.loss(model).backward()
        optimizer.step()
        yield time.perf_counter() - began


def tune(most: int) -> None:
    """Train until autotuning is over, or for ``most`` steps where that is not 0."""
    hvd.init()
    for step, _ in enumerate(train(WORKLOADS["mlp"]()), 1):
        if step >= (most or MOST) or (not most and step % 20 == 0 and tuned()):
            return


def compare(rounds: int) -> None:
    """Print by case the steps a second of each round."""
    cases: dict[str, dict[str, str]] = json.loads(os.environ[CASES])
    workload = WORKLOADS["mlp"]()
    found: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds):
        order = list(cases)[:: -1 if number % 2 else 1]
        for name in order:
            with environment(cases[name]):
                hvd.init()
                steps = train(workload)
                seconds = [next(steps) for _ in range(WARM + STEPS)][WARM:]
                rank = hvd.rank()
                hvd.shutdown()
            found[name].append(1 / median(seconds))
    if rank == 0:
        print(json.dumps(found), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    mode, number = sys.argv[1], int(sys.argv[2])
    tune(number) if mode == "tune" else compare(number)


if __name__ == "__main__":
    main()
