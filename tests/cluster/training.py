"""A training of 4 ranks whose result says on how many hosts it ran, and what came out, to the last bit.

It needs no framework: a test that is about how ranks are started, and what carries between their hosts, has them import no
more than NumPy. Between reductions it adds, multiplies and divides element by element, as IEEE 754 has it: libraries choose
their matrix products and functions by the machine and by variables, which the ranks of some launchers do not share.
:data:`PYTORCH` is the same for the few tests that are about PyTorch.
"""

from __future__ import annotations

import re
from typing import NamedTuple

TRAINING = """
import hashlib, math, os, numpy, plain
from horovod.common import basics

def product(a, b):
    total = numpy.zeros((len(a), b.shape[1]), numpy.float32)
    for index in range(len(b)):
        total += a[:, index : index + 1] * b[index]
    return total

def uniform(random, *shape):
    return random.random(shape, numpy.float32) - numpy.float32(0.5)

def train(steps=20):
    plain.init()
    random = numpy.random.default_rng(7)
    shapes = {"in": (6, 64), "in.bias": (64,), "out": (64, 3), "out.bias": (3,)}
    weights = {name: uniform(random, *shape) for name, shape in shapes.items()}
    momenta = {name: numpy.zeros_like(values) for name, values in weights.items()}
    random = numpy.random.default_rng(100 + plain.rank())
    for _ in range(steps):
        x, ones = uniform(random, 8, 6), numpy.ones((1, 8), numpy.float32)
        hidden = product(x, weights["in"]) + weights["in.bias"]
        hidden /= 1 + abs(hidden)
        y = product(hidden, weights["out"]) + weights["out.bias"]
        dy = 2 * y / y.size
        slope = 1 - abs(hidden)
        dx = product(dy, weights["out"].T) * slope * slope
        gradients = {
            "out.bias": product(ones, dy)[0], "out": product(hidden.T, dy),
            "in.bias": product(ones, dx)[0], "in": product(x.T, dx),
        }
        for name, total in plain.sums(gradients).items():
            momenta[name] = numpy.float32(0.9) * momenta[name] + total / plain.size()
            weights[name] -= numpy.float32(0.1) * momenta[name]
    found = numpy.concatenate([values.ravel() for values in weights.values()])
    sizes = f"{plain.size()} {basics.cross_size()}"
    plain.shutdown()
    norm = math.sqrt(math.fsum(each * each for each in found.tolist()))
    os.write(1, f"{sizes} {hashlib.sha256(found.tobytes()).hexdigest()} {norm}\\n".encode())  # whole: ranks share the pipe

os.environ.setdefault("HOROVOD_HIERARCHICAL_ALLREDUCE", "0")
"""
"""To be followed by calls of ``train()``. Gradients are added by an engine of all ranks, unless the environment says otherwise:
in steps, what the hosts contribute is added host by host, and the last bits may differ."""

PYTORCH = """
import hashlib, os, torch, horovod.torch as hvd

def train_pytorch(steps=20):
    hvd.init()
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 6, generator=generator)).square().mean().backward()
        optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    sizes = f"{hvd.size()} {hvd.cross_size()}"
    hvd.shutdown()
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
    os.write(1, f"{sizes} {digest} {float(weights.double().norm())}\\n".encode())
"""
"""To be followed by calls of ``train_pytorch()``."""


class Outcome(NamedTuple):
    """What one rank prints.

    Attributes:
        sizes: how many ranks, on how many hosts.
        digest: of the weights' bits.
        norm: of the weights.
    """

    sizes: str
    digest: str
    norm: float


def outcomes(text: str) -> list[Outcome]:
    """All that ranks have printed."""
    found = re.findall(r"(\d+ \d+) ([0-9a-f]{64}) ([\d.]+)", text)
    return [Outcome(sizes, digest, float(norm)) for sizes, digest, norm in found]
