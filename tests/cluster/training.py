"""A training of 4 ranks whose result says on how many hosts it ran, and what came out, to the last bit."""

from __future__ import annotations

import re
from typing import NamedTuple

STEPS = 20

TRAINING = """
import hashlib, torch, horovod.torch as hvd
hvd.init()
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
generator = torch.Generator().manual_seed(hvd.rank())
for _ in range({steps}):
    optimizer.zero_grad()
    x = torch.randn(8, 6, generator=generator)
    model(x).square().mean().backward()
    optimizer.step()
weights = torch.cat([p.detach().flatten() for p in model.parameters()])
digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
norm = float(weights.double().norm())
print(f"{{hvd.size()}} {{hvd.cross_size()}} {{digest}} {{norm}}\\n", end="", flush=True)  # in one write: ranks share the pipe
"""

IN_RANK_ORDER = "import os; os.environ['HOROVOD_HIERARCHICAL_ALLREDUCE'] = '0'\n"
"""Before the program: in steps, what the hosts contribute is added host by host, and the last bits may differ."""


class Outcome(NamedTuple):
    """What one rank prints.

    Attributes:
        places: how many ranks, on how many hosts.
        digest: of the weights' bits.
        norm: of the weights.
    """

    places: str
    digest: str
    norm: float


def outcomes(text: str) -> list[Outcome]:
    """All that ranks have printed."""
    found = re.findall(r"(\d+ \d+) ([0-9a-f]{64}) ([\d.]+)", text)
    return [Outcome(places, digest, float(norm)) for places, digest, norm in found]
