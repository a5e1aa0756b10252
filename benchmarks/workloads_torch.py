"""The models of ``workloads.py`` in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import workloads as sizes
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
    """ResNet-18 for small images: 62 tensors."""
    inputs = sizes.STAGES[0][0]
    layers: list[nn.Module] = [nn.Conv2d(3, inputs, 3, padding=1, bias=False), nn.BatchNorm2d(inputs), nn.ReLU()]
    for outputs, stride in sizes.STAGES:
        layers += [ResidualBlock(inputs, outputs, stride), ResidualBlock(outputs, outputs, 1)]
        inputs = outputs
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, sizes.CLASSES)]
    images = torch.randn(sizes.IMAGES, 3, sizes.SIDE, sizes.SIDE)
    return Workload(nn.Sequential(*layers), images, torch.randint(sizes.CLASSES, (sizes.IMAGES,)))


def mlp() -> Workload:
    """Dense layers, all of one width: 14 tensors."""
    rows, width = sizes.ROWS, sizes.WIDTH
    layers: list[nn.Module] = []
    for _ in range(sizes.LAYERS):
        layers += [nn.Linear(width, width), nn.ReLU()]
    layers.append(nn.Linear(width, sizes.CLASSES))
    return Workload(nn.Sequential(*layers), torch.randn(rows, width), torch.randint(sizes.CLASSES, (rows,)))


class Transformer(nn.Module):
    """An encoder that predicts one token for each position."""

    def __init__(self) -> None:
        super().__init__()
        width = sizes.EMBEDDING
        layer = nn.TransformerEncoderLayer(width, sizes.HEADS, 4 * width, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(sizes.VOCABULARY, width)
        self.encoder = nn.TransformerEncoder(layer, num_layers=sizes.BLOCKS, enable_nested_tensor=False)
        self.head = nn.Linear(width, sizes.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:  # (sequences, length) -> (sequences * length, vocabulary)
        return self.head(self.encoder(self.embedding(tokens))).flatten(0, 1)


def transformer() -> Workload:
    """Narrow layers: 147 tensors."""
    tokens = torch.randint(sizes.VOCABULARY, (sizes.SEQUENCES, sizes.LENGTH))
    return Workload(Transformer(), tokens, tokens.flatten())


WORKLOADS: dict[str, Callable[[], Workload]] = {"cnn": cnn, "mlp": mlp, "transformer": transformer}
