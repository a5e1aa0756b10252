"""Combine the steps of all ranks with Adasum instead of averaging their gradients.

    horovodrun -np 2 python examples/pytorch_adasum.py
    horovodrun -np 2 python examples/pytorch_adasum.py --average    # to compare

With an average, a step is as large as that of one rank, so the learning rate is usually raised with the number of ranks. Adasum
adds up steps of different directions, and averages steps of the same direction. The learning rate for one rank is then also
right for many. Each rank makes its optimizer's step with its own gradients, and Adasum combines the steps.

The data are the 1,797 handwritten digits that come with scikit-learn (see pytorch_digits.py).
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import horovod.torch as hvd
import pytorch_digits as digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--average", action="store_true", help="average gradients instead")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=0.02, help="that for one rank (default: 0.02)")
    options = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=0.9),
        named_parameters=model.named_parameters(),
        op=hvd.Average if options.average else hvd.Adasum,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    for epoch in range(1, options.epochs + 1):
        for images, labels in digits.batches(epoch, hvd.rank(), hvd.size()):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        if hvd.rank() == 0:
            loss, right = digits.score(model)
            print(f"epoch {epoch}: training loss {loss:.4f}, test accuracy {right:.2%}", flush=True)


if __name__ == "__main__":
    main()
