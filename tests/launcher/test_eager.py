"""Scripts that tests launch import less, and what they import and make themselves is as ever: ``tests/eager``."""

from __future__ import annotations

import pytest

from launcher.harness import Launcher, finish
from part import ALL

pytest.importorskip("torch")

seldom = pytest.mark.skipif(not ALL, reason="it checks what the tests import, after a change of that: make test-all")

SCRIPT = """
import sys
import torch

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
print("after a step:", "torch._dynamo.eval_frame" in sys.modules, hasattr(torch._meta_registrations, "__file__"))
compiled_class = torch._dynamo.OptimizedModule
assert not isinstance(model, compiled_class)
graphs = []

def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward

expected = model(torch.ones(1, 2))
compiled = torch.compile(model, backend=backend)
assert compiled(torch.ones(1, 2)).equal(expected) and isinstance(compiled, compiled_class)
print("compiled:", len(graphs), hasattr(torch._meta_registrations, "__file__"))
"""


def test_the_compiler_is_imported_by_a_script_that_compiles(launcher: Launcher) -> None:
    done = finish(launcher.python("-c", SCRIPT))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["after a step: False False", "compiled: 1 True"]


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


@seldom
def test_what_tensorflow_has_is_found_under_every_name(launcher: Launcher) -> None:
    pytest.importorskip("tensorflow")
    script = """
import tensorflow as tf
names = tf.compat.v1.compat
assert not hasattr(names, "__file__") and names.v1.Session is tf.compat.v1.Session
import tensorflow.compat.v1 as v1
assert v1.compat.v2.reduce_sum is tf.reduce_sum and v1.compat.as_text(b"x") == "x"
"""
    done = finish(launcher.python("-c", script))
    assert done.returncode == 0, done.stderr


@seldom
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
