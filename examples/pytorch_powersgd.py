"""Compress gradients: with PowerSGD, or by sending only their largest elements.

    horovodrun -np 2 python examples/pytorch_powersgd.py
    horovodrun -np 2 python examples/pytorch_powersgd.py --compression topk
    horovodrun -np 2 python examples/pytorch_powersgd.py --compression none    # to compare

Both methods store the part of a gradient that was not sent, and add it to the next step's gradient. They make training faster
if the network is the bottleneck: with many hosts, or large layers. On one host they make it slower.

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
    parser.add_argument("--compression", choices=["powersgd", "topk", "none"], default="powersgd")
    parser.add_argument("--rank", type=int, default=2, help="columns of PowerSGD's factors (default: 2)")
    parser.add_argument("--ratio", type=float, default=0.05, help="share of the elements for topk (default: 0.05)")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    compression = {
        "powersgd": hvd.Compression.powersgd(rank=options.rank),
        "topk": hvd.Compression.topk(ratio=options.ratio),
        "none": hvd.Compression.none,
    }[options.compression]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=compression,
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
