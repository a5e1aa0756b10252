"""Train a network on handwritten digits in a job whose ranks may change while it runs.

    horovodrun -np 2 python examples/pytorch_mnist_elastic.py

A step uses 64 digits for any number of ranks: each rank accumulates its share. The numbered lines make the program elastic.
Without an elastic launcher it trains with the ranks that it was started with, to the same result.
The data are the 1,797 handwritten digits that come with scikit-learn; no network is needed.

Needs the extras ``torch`` and ``examples``. Takes less than a minute on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import horovod.torch as hvd

TRAINING = 1437
"""The number of digits for training, from the start; the other 360 are for testing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--global-batch", type=int, default=64, help="digits a step, over all ranks (default: 64)")
    parser.add_argument(
        "--micro-batch", type=int, default=32, help="the most that a rank takes at a time (default: 32)"
    )
    parser.add_argument("--rollback", choices=["commit", "step"], default="commit")
    options = parser.parse_args()

    hvd.init()
    torch.manual_seed(1)
    images, labels = load()
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    # 1: a sampler that continues within an epoch, with any number of ranks
    data = torch.utils.data.TensorDataset(images[:TRAINING], labels[:TRAINING])
    sampler = hvd.elastic.GlobalBatchSampler(data, options.global_batch, options.micro_batch)
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)

    # 2: everything that changes while it trains
    state = hvd.elastic.TorchState(
        model, optimizer, rollback=options.rollback, sampler=sampler, scheduler=scheduler, epoch=0
    )

    @hvd.elastic.run  # 3: called again after each change, with the state that all ranks have
    def train(state: Any) -> None:
        while state.epoch < options.epochs:
            for step in sampler.steps(loader):
                optimizer.zero_grad()
                for (x, y), weight, last in step:
                    with contextlib.nullcontext() if last else optimizer.no_sync():
                        (F.cross_entropy(model(x), y) * weight).backward()
                optimizer.step()
                scheduler.step()
                sampler.record_step()  # 4: these digits are done
                state.commit()  # 5: a failure only loses the work after this line
            state.epoch += 1
            sampler.set_epoch(state.epoch)  # at the end of an epoch
            with torch.no_grad():
                scores = model(images)
            loss = F.cross_entropy(scores[:TRAINING], labels[:TRAINING])
            right = (scores.argmax(dim=1) == labels)[TRAINING:].float().mean()
            if hvd.rank() == 0:
                print(f"epoch {state.epoch}, {hvd.size()} ranks: loss {loss:.4f}, reads {right:.1%}", flush=True)

    train(state)


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 handwritten digits: images, float32 (1797, 64), from -1 (paper) to 1 (ink), and labels, int64 (1797,)."""
    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float() / 8 - 1, torch.from_numpy(labels)


if __name__ == "__main__":
    main()
