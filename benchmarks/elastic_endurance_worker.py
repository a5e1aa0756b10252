"""One rank of ``benchmarks/elastic_endurance.py``: learns what another network computes, until a file tells it to end.

elastic_endurance_worker.py FOLDER
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import torch

import horovod.torch as hvd

SAMPLES, GLOBAL_BATCH = 2048, 64
PAUSE_SECONDS = 0.01
"""After each step, so that processes that start get some of the machine."""
LOG_SECONDS = 0.25

folder = Path(sys.argv[1])


def main() -> None:
    torch.manual_seed(1)
    x = torch.randn(SAMPLES, 32)
    teacher = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    with torch.no_grad():
        y = 4.0 * teacher(x)
    model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8))
    plain = torch.optim.SGD(model.parameters(), lr=0.0005)
    data = torch.utils.data.TensorDataset(x, y)
    hvd.init()  # the others go on without this process up to here
    optimizer = hvd.DistributedOptimizer(plain)
    sampler = hvd.elastic.GlobalBatchSampler(data, GLOBAL_BATCH)
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)
    state = hvd.elastic.TorchState(
        model, optimizer, rollback="step", sampler=sampler, epoch=0, step=0, over=False, logged=0.0, losses=[]
    )

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        write(folder / f"member.{os.getpid()}", os.environ["HOROVOD_ELASTIC_ROUND"])
        while not state.over:
            for parts in sampler.steps(loader):
                loss = train_step(parts)
                state.step += 1
                state.losses = [*state.losses, loss]
                if time.monotonic() > state.logged + LOG_SECONDS:
                    log(state)
                    state.losses, state.logged = [], time.monotonic()
                sampler.record_step()
                time.sleep(PAUSE_SECONDS)
                state.commit()
                if state.over:
                    return
            state.epoch += 1
            sampler.set_epoch(state.epoch)

    def train_step(parts: object) -> float:
        """The mean loss over the global batch. What rank 0 knows of the end of the job travels with it."""
        optimizer.zero_grad()
        total = 0.0
        for (inputs, targets), weight, last in parts:
            with contextlib.nullcontext() if last else optimizer.no_sync():
                loss = torch.nn.functional.mse_loss(model(inputs), targets) * weight
                total += float(loss.detach())
                if last:
                    ends = hvd.rank() == 0 and (folder / "end").exists()
                    mean, over = hvd.allreduce(torch.tensor([total, float(ends)]), name="loss").tolist()
                loss.backward()
        optimizer.step()
        state.over = over > 0
        return mean

    train(state)


def log(state: hvd.elastic.TorchState) -> None:
    if hvd.rank() == 0:
        entry = {
            "at": time.monotonic(),
            "step": state.step,
            "loss": sum(state.losses) / len(state.losses),
            "size": hvd.size(),
            "round": int(os.environ["HOROVOD_ELASTIC_ROUND"]),
        }
        with (folder / "log").open("a") as file:
            file.write(json.dumps(entry) + "\n")


def write(path: Path, text: str) -> None:
    """All at once, for who reads it meanwhile."""
    new = path.with_name(f".{path.name}")
    new.write_text(text)
    new.rename(path)


if __name__ == "__main__":
    main()
