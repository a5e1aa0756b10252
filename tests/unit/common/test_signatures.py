"""Public functions keep their signature attributes, which scripts read and set: ``hvd.broadcast.__defaults__``."""

from __future__ import annotations

import importlib
import inspect
import types
from typing import Any

import pytest

BINDINGS = {
    "torch": ["horovod.torch", "horovod.torch.mpi_ops", "horovod.torch.functions"],
    "tensorflow": ["horovod.tensorflow", "horovod.tensorflow.mpi_ops", "horovod.tensorflow.functions"],
    "keras": ["horovod.keras", "horovod.tensorflow.keras"],
    "mxnet": ["horovod.mxnet", "horovod.mxnet.mpi_ops", "horovod.mxnet.functions"],
    "json": ["horovod", "horovod.common.basics", "horovod.common.process_sets", "horovod.common.util"],
}


def differing(module: Any) -> dict[str, Any]:
    """Functions whose own attributes are not those of the signature that they show."""
    found = {}
    for name in getattr(module, "__all__", dir(module)):
        function = getattr(module, name)
        if not isinstance(function, types.FunctionType):
            continue
        parameters = inspect.signature(function).parameters.values()
        positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        defaults = tuple(each.default for each in positional if each.default is not each.empty) or None
        names = tuple(each.name for each in positional)
        own = function.__defaults__, function.__code__.co_varnames[: function.__code__.co_argcount]
        if own != (defaults, names):
            found[name] = own
    return found


@pytest.mark.parametrize(
    ("framework", "name"), [(framework, name) for framework, names in BINDINGS.items() for name in names]
)
def test_functions_have_the_defaults_and_arguments_that_their_signatures_show(framework: str, name: str) -> None:
    pytest.importorskip(framework)
    assert differing(importlib.import_module(name)) == {}


def test_a_default_that_a_script_sets_has_an_effect() -> None:
    pytest.importorskip("tensorflow")
    import tensorflow as tf

    import horovod.tensorflow as hvd

    function: Any = hvd.broadcast
    saved = function.__defaults__
    names = list(inspect.signature(function).parameters)
    try:
        function.__defaults__ = (*saved[:-1], "no process set")
        assert names[-1] == "process_set"
        for call in (hvd.broadcast, tf.function(lambda x, root: hvd.broadcast(x, root))):
            with pytest.raises(Exception, match="no process set"):
                call(tf.constant(1.0), 0)
    finally:
        function.__defaults__ = saved
