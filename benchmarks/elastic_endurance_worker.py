"""One rank of ``benchmarks/elastic_endurance.py``: learns what another network computes, until a file tells it to end.

elastic_endurance_worker.py FOLDER
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

import torch
from elastic_endurance_log import BEGINNING, PAUSE_SECONDS, RankLog

import horovod.torch as hvd

SAMPLES, GLOBAL_BATCH = 2048, 64

log = RankLog(Path(sys.argv[1]))


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
    state = hvd.elastic.TorchState(model, optimizer, rollback="step", sampler=sampler, epoch=0, **BEGINNING)

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        log.begin_round()
        while not state.over:
            for parts in sampler.steps(loader):
                log.end_step(state, train_step(parts))
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
                    ends = float(log.is_to_end())
                    mean, over = hvd.allreduce(torch.tensor([total, ends]), name="loss").tolist()
                loss.backward()
        optimizer.step()
        state.over = over > 0
        return mean

    train(state)


if __name__ == "__main__":
    main()
