"""One rank of ``tests/elastic_events.py --program ddp``: DistributedDataParallel over the back end ``horovod``.

    elastic_ddp_rank.py FOLDER

Each rank of each step has data of its own, so the result depends on how many ranks made each step. The state has that history,
and :func:`judge` makes the same steps in one process. The program has the files of ``elastic_events_rank.py``, and looks for

    raise.NUMBER    the process of this number raises an exception, at the point of the step that the file names
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from elastic_events_rank import PAUSE_SECONDS, returns_early, takes, writer

Runs = Sequence[Sequence[int]]
"""Pairs of a number of ranks and of how many steps these made, one after another."""
RAISING = ["forward", "backward", "step"]
_TOLERANCE = 1e-9


class Counting(nn.Module):
    """Counts its forward passes in a buffer, which the state and DistributedDataParallel keep alike on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.float64))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes += 1
        return values


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    layers = [nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 24), nn.Tanh(), Counting(), nn.Linear(24, 3)]
    model = nn.Sequential(*layers).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """The loss on the data of one rank of one step."""
    chance = np.random.default_rng([step, rank])
    inputs = torch.from_numpy(chance.normal(size=(4, 6)))
    return nn.functional.mse_loss(model(inputs), torch.from_numpy(chance.normal(size=(4, 3))))


def values_of(model: nn.Module) -> list[float]:
    return [float(value) for each in model.state_dict().values() for value in each.flatten()]


def reference(runs: Runs) -> list[float]:
    """Parameters and buffers after the same steps in one process."""
    model, optimizer = made()
    step = 0
    for size, count in runs:
        for _ in range(count):
            optimizer.zero_grad()
            for rank in range(size):
                model.train(rank == 0)
                (loss_of(model, step, rank) / size).backward()
            optimizer.step()
            step += 1
    return values_of(model)


def judge(results: Sequence[Sequence[Any]]) -> str:
    """What is wrong with the ranks' results; "" if they are right."""
    if len({(step, digest, json.dumps(runs)) for step, digest, _, runs, _ in results}) != 1:
        return f"the ranks differ: {[each[:4] for each in results]}"
    step, _, _, runs, values = results[0]
    if sum(count for _, count in runs) != step:
        return f"{step} steps, of which the history has others: {runs}"
    wanted = reference(runs)
    furthest = max(abs(value - right) for value, right in zip(values, wanted, strict=True))
    return "" if furthest < _TOLERANCE else f"after {runs} the values differ from the reference by {furthest}"


def main() -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import horovod.torch as hvd

    torch.set_num_threads(1)
    folder, number = Path(sys.argv[1]), os.environ["HOROVOD_ELASTIC_PROCESS"]
    if takes(folder / "newcomer.exits", number):
        return
    calls = takes(folder / "newcomer.calls", number)
    dist.init_process_group("horovod")
    if calls:
        dist.barrier()
    model, optimizer = made()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.002)  # several buckets
    state = hvd.elastic.TorchState(ddp, optimizer, step=0, runs=[], over=False)
    sizes: list[int] = []

    write = writer(folder, number)

    def may_raise(where: str) -> None:
        path = folder / f"raise.{number}"
        if path.exists() and path.read_text() == where:
            raise ArithmeticError(f"process {number}, step {state.step}")

    model[2].register_forward_hook(lambda *_: may_raise("forward"))
    model[2].register_full_backward_hook(lambda *_: may_raise("backward"))

    @hvd.elastic.run
    def train(state: Any) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        assert (rank, size) == (hvd.rank(), hvd.size()) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        sizes.append(size)
        training_round = os.environ["HOROVOD_ELASTIC_ROUND"]
        write(f"member.{number}", training_round)
        while not state.over:
            if returns_early(folder, number):
                return
            over = torch.tensor(float(rank == 0 and (folder / "end").exists()))
            dist.broadcast(over, 0)
            optimizer.zero_grad()
            loss_of(ddp, state.step, rank).backward()
            may_raise("step")
            optimizer.step()
            earlier = state.runs
            made_before = earlier[-1][1] if earlier and earlier[-1][0] == size else 0
            state.runs = [*earlier[: len(earlier) - bool(made_before)], (size, made_before + 1)]
            state.step, state.over = state.step + 1, bool(over)
            if rank == 0:
                write("progress", f"{state.step} {training_round}")
            time.sleep(PAUSE_SECONDS)
            state.commit()
        dist.broadcast(model[4].passes, 0)  # as the next forward pass does

    train(state)
    if not state.over:
        return  # early
    values = values_of(model)
    digest = hashlib.sha256(np.array(values).tobytes()).hexdigest()
    write(f"result.{number}", json.dumps([state.step, digest, sizes, state.runs, values]))


if __name__ == "__main__":
    main()
