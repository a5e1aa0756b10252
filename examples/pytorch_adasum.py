"""Combine the steps of all ranks with Adasum instead of averaging their gradients.

    horovodrun -np 2 python examples/pytorch_adasum.py
    horovodrun -np 2 python examples/pytorch_adasum.py --average    # to compare

With an average, a step is as large as that of one rank, so the learning rate is usually raised with the number of ranks. Adasum
adds up steps of different directions, and averages steps of the same direction. The learning rate for one rank is then also
right for many. Each rank makes its optimizer's step with its own gradients, and Adasum combines the steps.

The data are the 1,797 handwritten digits that come with scikit-learn; no network is needed.

Needs the extras ``torch`` and ``examples``. Takes less than a minute on two cores.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import horovod.torch as hvd

TRAINING = 1437
"""The number of digits for training, from the start; the other 360 are for testing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--average", action="store_true", help="average gradients instead")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=0.02, help="that for one rank (default: 0.02)")
    options = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    images, labels = load()
    training = TensorDataset(images[:TRAINING], labels[:TRAINING])
    sampler = DistributedSampler(training, hvd.size(), hvd.rank())
    loader = DataLoader(training, batch_size=32, sampler=sampler)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=0.9),
        named_parameters=model.named_parameters(),
        op=hvd.Average if options.average else hvd.Adasum,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    for epoch in range(1, options.epochs + 1):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        if hvd.rank() == 0:
            with torch.no_grad():
                scores = model(images)
            loss = F.cross_entropy(scores[:TRAINING], labels[:TRAINING])
            right = (scores.argmax(dim=1) == labels)[TRAINING:].float().mean()
            print(f"epoch {epoch}: training loss {loss:.4f}, test accuracy {right:.2%}", flush=True)


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 handwritten digits: images, float32 (1797, 64), from -1 (paper) to 1 (ink), and labels, int64 (1797,)."""
    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float() / 8 - 1, torch.from_numpy(labels)


if __name__ == "__main__":
    main()
