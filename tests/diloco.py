"""DiLoCo in NumPy, in float64: what ``hvd.LocalOptimizer`` must compute. Written from arXiv:2311.08105 (algorithm 1) and
arXiv:2501.18512 (algorithm 2), without anything of Horovod.

The model is ``(x * scale) @ weight + bias) * gain`` with a squared error, whose gradients are written out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Parameters = dict[str, Array]
INPUTS, OUTPUTS, BATCH = 6, 3, 4
INNER_LR, INNER_MOMENTUM = 0.02, 0.8


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        hosts: by rank, a letter for its host.
    """

    hosts: str
    every: int
    fragments: int
    delay: int
    steps: int
    lr: float
    momentum: float
    nesterov: bool
    mixing: float


def beginning(seed: int = 0) -> Parameters:
    random = np.random.default_rng(seed)
    return {
        "scale": 1 + 0.1 * random.standard_normal(INPUTS),
        "weight": 0.3 * random.standard_normal((INPUTS, OUTPUTS)),
        "bias": 0.1 * random.standard_normal(OUTPUTS),
        "gain": 1 + 0.1 * random.standard_normal(OUTPUTS),
    }


def batch(step: int, rank: int) -> tuple[Array, Array]:
    """What a rank trains on in a step, from 1."""
    random = np.random.default_rng([step, rank])
    return random.standard_normal((BATCH, INPUTS)), random.standard_normal((BATCH, OUTPUTS))


def gradients(p: Parameters, x: Array, y: Array) -> Parameters:
    h = x * p["scale"]
    z = h @ p["weight"] + p["bias"]
    error = 2 * (z * p["gain"] - y) / y.size
    dz = error * p["gain"]
    return {
        "scale": ((dz @ p["weight"].T) * x).sum(0),
        "weight": h.T @ dz,
        "bias": dz.sum(0),
        "gain": (error * z).sum(0),
    }


def train(
    case: Case,
    fragment_of: Mapping[str, int],
    lost: Mapping[str, int] | None = None,
    joined: Mapping[str, int] | None = None,
) -> dict[str, Parameters]:
    """The parameters of each host at the end, or where it was lost.

    Args:
        fragment_of: by parameter, its fragment.
        lost: by host, the last step that it takes part in.
        joined: by host, the last step before it takes part. It begins with the outer parameters, and the momentum of the first
            host.
    """
    lost, joined = lost or {}, joined or {}
    names = sorted(set(case.hosts))
    local = {host: beginning() for host in names}
    inner = {host: {name: np.zeros_like(value) for name, value in beginning().items()} for host in names}
    outer, velocity = beginning(), {name: np.zeros_like(value) for name, value in beginning().items()}
    sent: dict[tuple[int, str], Array] = {}
    for step in range(1, case.steps + 1):
        for host in (host for host, last in joined.items() if last == step - 1):
            local[host] = {name: value.copy() for name, value in outer.items()}
            inner[host] = {name: value.copy() for name, value in inner[names[0]].items()}
        present = [host for host in names if joined.get(host, 0) < step <= lost.get(host, case.steps)]
        for host in present:
            ranks = [rank for rank, each in enumerate(case.hosts) if each == host]
            found = [gradients(local[host], *batch(step, rank)) for rank in ranks]
            for name in outer:
                mean = np.mean([each[name] for each in found], axis=0)
                inner[host][name] = INNER_MOMENTUM * inner[host][name] + mean
                local[host][name] = local[host][name] - INNER_LR * inner[host][name]
        for name, part in fragment_of.items():
            first = (part + 1) * case.every // case.fragments
            if step >= first and (step - first) % case.every == 0:
                changes = [outer[name] - local[host][name] for host in case.hosts if host in present]
                sent[step, name] = np.mean(changes, axis=0)
            if (change := sent.get((step - case.delay, name))) is not None:
                velocity[name] = case.momentum * velocity[name] + change
                by = change + case.momentum * velocity[name] if case.nesterov else velocity[name]
                outer[name] = outer[name] - case.lr * by
                for host in present:
                    local[host][name] = case.mixing * local[host][name] + (1 - case.mixing) * outer[name]
    return local


def torch_model(dtype: Any = None) -> Any:
    """The model in PyTorch, with the parameters of :func:`beginning`."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, value in beginning().items():
                self.register_parameter(name, torch.nn.Parameter(torch.tensor(value, dtype=dtype or torch.float64)))

        def forward(self, x: Any) -> Any:
            return ((x * self.scale) @ self.weight + self.bias) * self.gain

    return Model()


def torch_step(model: Any, optimizer: Any, step: int, rank: int) -> None:
    """One step of a rank."""
    import torch

    x, y = (torch.from_numpy(each).to(model.bias.dtype) for each in batch(step, rank))
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def arrays(model: Any) -> Parameters:
    return {name: each.detach().double().numpy().copy() for name, each in model.named_parameters()}


def distance(one: Parameters, other: Parameters) -> float:
    """How far apart parameters are at most, relative to the largest of each."""
    return max(float(np.abs(one[name] - other[name]).max() / np.abs(other[name]).max()) for name in other)


def random_cases(number: int, seed: int, ranks: int = 4) -> Sequence[Case]:
    random = np.random.default_rng(seed)
    cases = []
    for _ in range(number):
        every = int(random.integers(1, 9))
        fragments = int(random.integers(1, min(every, 4) + 1))
        delay = int(random.integers(0, every))
        momentum = float(random.choice([0.0, 0.5, 0.9]))
        hosts = str(random.choice(["aabb", "abbb", "abab", "aabc", "abcd", "aaaa"]))[:ranks]
        cases.append(
            Case(
                hosts,
                every,
                fragments,
                delay,
                int(random.integers(1, 4 * every + 2)),
                float(random.uniform(0.2, 1.0)),
                momentum,
                bool(momentum) and bool(random.integers(2)),
                float(random.choice([0.0, 0.5, 0.3])),
            )
        )
    return cases
