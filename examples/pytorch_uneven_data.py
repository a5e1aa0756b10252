"""Train on ranks that have different amounts of data: a rank without more batches joins, and the others continue.

    horovodrun -np 2 python examples/pytorch_uneven_data.py

Rank 1 has twice as many digits as rank 0, rank 2 three times as many, and so on. Without ``join()`` the ranks with more batches
would wait forever for gradients from ranks with fewer. A rank that has joined contributes zeros until all ranks have joined.

The data are the 1,797 handwritten digits that come with scikit-learn; no network is needed.

Needs the extras ``torch`` and ``examples``. Takes less than a minute on two cores.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import horovod.torch as hvd

TRAINING = 1437
"""The number of digits for training, from the start; the other 360 are for testing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    images, labels = load()
    mine = part(hvd.rank(), hvd.size())
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    for epoch in range(1, options.epochs + 1):
        batches = mine[torch.randperm(len(mine))].split(32)
        for batch in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        # This rank has no more batches. It waits here for ranks that have more.
        last = hvd.join()
        # Only the rank that joined last has made all steps. The others take over its parameters and momentum.
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
        steps = hvd.allgather(torch.tensor([len(batches)])).tolist()
        if hvd.rank() == 0:
            with torch.no_grad():
                right = (model(images).argmax(dim=1) == labels)[TRAINING:].float().mean()
            print(f"epoch {epoch}: steps by rank {steps}, rank {last} was last, test accuracy {right:.2%}", flush=True)


def part(rank: int, size: int) -> torch.Tensor:
    """Indices of this rank's images: shares of 1, 2, 3, ... parts."""
    parts = size * (size + 1) // 2
    start, stop = rank * (rank + 1) // 2, (rank + 1) * (rank + 2) // 2
    return torch.arange(TRAINING * start // parts, TRAINING * stop // parts)


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 handwritten digits: images, float32 (1797, 64), from -1 (paper) to 1 (ink), and labels, int64 (1797,)."""
    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float() / 8 - 1, torch.from_numpy(labels)


if __name__ == "__main__":
    main()
