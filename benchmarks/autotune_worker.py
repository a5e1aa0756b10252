"""One rank of ``autotune.py``: trains the MLP for so many steps, or for 0 until autotuning is over, and says how fast."""

from __future__ import annotations

import sys
import time
from statistics import median

import torch
from workloads_torch import WORKLOADS

import horovod.torch as hvd
from horovod.core.lifecycle.context import running
from horovod.core.worker.coordinator import Coordinator

WARM = 5
MOST = 20_000


def tuned() -> bool:
    """Whether autotuning is over. The same on all ranks."""
    role = running().workers[0].role
    over = isinstance(role, Coordinator) and role.tuner is None
    return bool(hvd.broadcast(torch.tensor(over), 0, name="over").item())


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    hvd.init()
    workload = WORKLOADS["mlp"]()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(workload.model.parameters(), lr=1e-3, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=workload.model.named_parameters())
    hvd.broadcast_parameters(workload.model.state_dict(), root_rank=0)
    steps, seconds = int(sys.argv[1]), []
    for step in range(steps or MOST):
        began = time.perf_counter()
        optimizer.zero_grad()
        workload.loss(workload.model).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
        if not steps and step % 20 == 0 and tuned():
            break
    if hvd.rank() == 0:
        print(f"{1 / median(seconds[WARM:]):.4f} steps/s", flush=True)


if __name__ == "__main__":
    main()
