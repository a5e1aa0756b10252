"""A small training that every way of reducing gradients must come through: handwritten digits, a two-layer network.

The 1,797 digits come with scikit-learn. Runs inside a rank, between ``init()`` and ``shutdown()``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import horovod.torch as hvd

TRAINING = 1437
GLOBAL_BATCH = 96


class Outcome(NamedTuple):
    """What a training came to on one rank.

    Attributes:
        accuracy: share of right answers on the 360 test digits.
        loss: mean training loss after the last step.
        digest: of the parameters' bits.
    """

    accuracy: float
    loss: float
    digest: str


def model() -> nn.Module:
    """64 pixels, 64 hidden units, 10 classes; the same parameters whoever calls it."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def train(wrap: Callable[[nn.Module], torch.optim.Optimizer], epochs: int = 12) -> Outcome:
    """Train on global batches of 96 digits, of which every rank takes its equal part.

    Args:
        wrap: makes the distributed optimizer for the model.
    """
    data = load_digits()
    x = torch.from_numpy(data.data).float() / 16 - 0.3
    y = torch.from_numpy(data.target).long()
    network = model()
    optimizer = wrap(network)
    share = GLOBAL_BATCH // hvd.size()
    for epoch in range(epochs):
        order = torch.randperm(TRAINING, generator=torch.Generator().manual_seed(epoch))
        for start in range(0, TRAINING - GLOBAL_BATCH + 1, GLOBAL_BATCH):
            mine = order[start + hvd.rank() * share :][:share]
            optimizer.zero_grad()
            F.cross_entropy(network(x[mine]), y[mine]).backward()
            optimizer.step()
    with torch.no_grad():
        loss = F.cross_entropy(network(x[:TRAINING]), y[:TRAINING]).item()
        accuracy = (network(x[TRAINING:]).argmax(dim=1) == y[TRAINING:]).float().mean().item()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in network.parameters())).hexdigest()
    return Outcome(accuracy, loss, digest)
