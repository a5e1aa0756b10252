"""The data of the small examples: 1,797 handwritten digits of 8 by 8 pixels that come with scikit-learn. No network is needed.

This file has nothing to do with Horovod. It keeps the examples that import it short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

TRAINING = 1437
"""The number of digits for training, from the start; the other 360 are for testing."""

_data = load_digits()
images = torch.from_numpy(_data.data).float() / 8 - 1
"""Pixels from -1 (paper) to 1 (ink), float32 of shape (1797, 64)."""
labels = torch.from_numpy(_data.target).long()
"""The labels, 0 to 9, int64 of shape (1797,)."""


def batches(epoch: int, rank: int, size: int, batch: int = 32) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """One rank's part of the training digits: images (batch, 64) and labels (batch,), in a new order every epoch.

    All ranks draw the same permutation and take equal parts of it, so each digit is seen once, and no rank has a batch more
    than another. The last batch may be smaller.
    """
    order = torch.randperm(TRAINING, generator=torch.Generator().manual_seed(epoch))
    part = TRAINING // size
    for chosen in order[rank * part : (rank + 1) * part].split(batch):
        yield images[chosen], labels[chosen]


@torch.no_grad()
def score(model: Callable[[torch.Tensor], torch.Tensor]) -> tuple[float, float]:
    """The model's mean loss on the training digits, and the share of test digits that it classifies correctly."""
    scores = model(images)
    loss = F.cross_entropy(scores[:TRAINING], labels[:TRAINING]).item()
    right = (scores[TRAINING:].argmax(dim=1) == labels[TRAINING:]).float().mean().item()
    return loss, right
