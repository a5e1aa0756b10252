"""Scripts that tests launch get PyTorch's compiler only if they use it: ``tests/eager``."""

from __future__ import annotations

import pytest

from launcher.harness import Launcher, finish

pytest.importorskip("torch")

SCRIPT = """
import sys
import torch

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
print("after a step:", "torch._dynamo.eval_frame" in sys.modules)
graphs = []

def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward

expected = model(torch.ones(1, 2))
assert torch.compile(model, backend=backend)(torch.ones(1, 2)).equal(expected)
print("compiled:", len(graphs))
"""


def test_the_compiler_is_imported_by_a_script_that_compiles(launcher: Launcher) -> None:
    done = finish(launcher.python("-c", SCRIPT))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["after a step: False", "compiled: 1"]
