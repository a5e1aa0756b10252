"""Send a fraction of the gradients and learn as much: PowerSGD, or the largest elements only.

    horovodrun -np 2 python examples/pytorch_powersgd.py
    horovodrun -np 2 python examples/pytorch_powersgd.py --compression topk
    horovodrun -np 2 python examples/pytorch_powersgd.py --compression none    # to compare

Both keep what was not sent and add it to the next step's gradients, so nothing is lost for good. They pay where the network
is slower than the processors: many hosts, or large layers. On one host they cost more than they save.

The data are the 1,797 handwritten digits that come with scikit-learn; no network is needed.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import horovod.torch as hvd

TRAINING, BATCH = 1437, 32


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
    images, labels = load()
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
        order = torch.randperm(TRAINING, generator=torch.Generator().manual_seed(epoch))
        for batch in order[: TRAINING // hvd.size() * hvd.size()].view(hvd.size(), -1)[hvd.rank()].split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        if hvd.rank() == 0:
            with torch.no_grad():
                scores = model(images)
            loss = F.cross_entropy(scores[:TRAINING], labels[:TRAINING]).item()
            right = (scores[TRAINING:].argmax(dim=1) == labels[TRAINING:]).float().mean().item()
            print(f"epoch {epoch}: training loss {loss:.4f}, test accuracy {right:.2%}", flush=True)


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """Images of 64 pixels around 0, float32 (1797, 64), and their labels."""
    digits = load_digits()
    return torch.from_numpy(digits.data).float() / 8 - 1, torch.from_numpy(digits.target).long()


if __name__ == "__main__":
    main()
