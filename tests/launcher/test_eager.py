"""Scripts that tests launch import less, and what they import and make themselves is as ever: ``tests/eager``."""

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


COLLECTED = """
import gc
import weakref

class Node: ...

def in_a_cycle():
    node = Node()
    node.itself = node
    return node

weakref.finalize(in_a_cycle(), print, "collected").atexit = False
assert gc.isenabled()
import torch
assert gc.isenabled() and gc.get_freeze_count() > 100_000
weakref.finalize(in_a_cycle(), print, "collected, too").atexit = False
gc.collect()
"""


def test_what_a_script_makes_itself_is_collected(launcher: Launcher) -> None:
    done = finish(launcher.python("-c", COLLECTED))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["collected, too"]


def test_keras_finds_its_back_end_and_not_what_it_could_do_without(launcher: Launcher) -> None:
    pytest.importorskip("keras")
    pytest.importorskip("jax")
    pytest.importorskip("tensorflow")
    script = (
        "import sys, keras; print('jax' in sys.modules); import jax, sklearn; print(jax.__name__, sklearn.__name__)"
    )
    for backend, imported in (("jax", True), ("tensorflow", False)):
        done = finish(launcher.python("-c", script, KERAS_BACKEND=backend))
        assert done.stdout.splitlines() == [str(imported), "jax sklearn"], done.stderr
