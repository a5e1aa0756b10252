"""What ``slow_links.py`` trains: digits (MNIST, 10,000 images), and the characters of a text that comes with Python."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONTEXT, CHARACTERS = 64, 128


@dataclass(frozen=True)
class Task:
    """Something to train.

    Attributes:
        make: makes the model.
        batch: ``batch(generator)``: the inputs and targets of one step of a host.
        validation: the inputs and targets that the loss is measured on.
        lr: the learning rate of Adam for one host.
        target: the validation loss that training has to reach, fixed before anything was measured.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    validation: tuple[Tensor, Tensor]
    lr: float
    target: float

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


class Convolutions(nn.Sequential):
    """A small network for images of 28 times 28; 1.7 million parameters."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(1568, 1024), nn.ReLU(), nn.Linear(1024, 10),
        )  # fmt: skip


class Characters(nn.Module):
    """A transformer that predicts the next character; 1.8 million parameters at a width of 192."""

    def __init__(self, width: int = 192, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, width)
        self.position = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, CHARACTERS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.encoder(self.embedding(tokens) + self.position, mask=self.mask, is_causal=True)
        found: Tensor = self.head(hidden)
        return found


def digits(path: Path) -> Task:
    """MNIST's images: 9,000 to train, 1,000 to validate.

    Args:
        path: an ``.npz`` file with ``x``, images, and ``y``, digits, as for ``examples/pytorch_mnist.py --data``.
    """
    with np.load(path) as file:
        images = torch.from_numpy(file["x"]).float().unsqueeze(1) / 255
        labels = torch.from_numpy(file["y"]).long()

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(9000, (32,), generator=generator)
        return images[chosen], labels[chosen]

    return Task(Convolutions, batch, (images[9000:], labels[9000:]), lr=1e-3, target=0.15)


def characters(_: Path) -> Task:
    """Python's own help texts: nine tenths to train, the rest to validate."""
    text = "".join(value for _, value in sorted(pydoc_data.topics.topics.items()))
    tokens = torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8).long() % CHARACTERS
    cut = len(tokens) * 9 // 10

    def windows(starts: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.stack([tokens[start : start + CONTEXT + 1] for start in starts.tolist()])
        return rows[:, :-1], rows[:, 1:]

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return windows(torch.randint(cut - CONTEXT - 1, (2,), generator=generator))

    validation = windows(torch.arange(cut, len(tokens) - CONTEXT - 1, (len(tokens) - cut) // 32))
    return Task(Characters, batch, validation, lr=1e-3, target=2.2)


TASKS: dict[str, Callable[[Path], Task]] = {"digits": digits, "characters": characters}
