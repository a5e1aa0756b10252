"""Three models that strain a training step in three ways, with a batch each of a size that one core can bear.

What decides how well training scales is the time of a step over the bytes of its gradients. On the machine these were
chosen on (one thread, 2026) the compute-bound network has about 8 ms of step for each megabyte, the communication-bound
one about 1 ms; the transformer lies between, but spreads its gradients over many small tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    """A model and one batch for it, the same on every rank but for its random numbers."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor

    def loss(self, model: nn.Module) -> Tensor:
        """Forward pass through ``model``, which is this workload's or a wrapper of it."""
        return F.cross_entropy(model(self.inputs), self.targets)

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions around which the input passes unchanged, or through a 1x1 convolution where sizes change."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def cnn() -> Workload:
    """ResNet-18 for images of 32 x 32: 11.2 million parameters in 62 tensors, compute-bound."""
    images = 20
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    inputs = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [ResidualBlock(inputs, outputs, stride), ResidualBlock(outputs, outputs, 1)]
        inputs = outputs
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return Workload(nn.Sequential(*layers), torch.randn(images, 3, 32, 32), torch.randint(10, (images,)))


def mlp() -> Workload:
    """Six dense layers of 2048: 25.2 million parameters in 14 tensors, communication-bound."""
    rows, width = 64, 2048
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(width, width), nn.ReLU()]
    layers.append(nn.Linear(width, 10))
    return Workload(nn.Sequential(*layers), torch.randn(rows, width), torch.randint(10, (rows,)))


class Transformer(nn.Module):
    """A 12-layer encoder over a vocabulary of 1,000, predicting one token for each position."""

    def __init__(self, width: int = 192, heads: int = 6, vocabulary: int = 1000) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(vocabulary, width)
        self.encoder = nn.TransformerEncoder(layer, num_layers=12, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:  # (sequences, length) -> (sequences * length, vocabulary)
        return self.head(self.encoder(self.embedding(tokens))).flatten(0, 1)


def transformer() -> Workload:
    """Twelve narrow layers: 5.7 million parameters in 147 tensors, most of them a few hundred bytes to 600 KB."""
    tokens = torch.randint(1000, (5, 64))
    return Workload(Transformer(), tokens, tokens.flatten())


WORKLOADS: dict[str, Callable[[], Workload]] = {"cnn": cnn, "mlp": mlp, "transformer": transformer}
