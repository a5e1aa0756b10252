"""The state of an elastic job that trains a Keras model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod._models import contents
from horovod.comm.datatypes import Array
from horovod.elastic.variables import Variables, VariablesState

_MUST_BE_BUILT = "Model must be built first. Run `model.build(input_shape)`."


class ModelState(VariablesState):
    """The state of an elastic job that trains a Keras model: the model, its optimizer and plain objects.

    Every rank must make it with the same attributes. At the start of a round, all ranks get the model's weights and the
    optimizer's variables from one rank. The states of random generators are not shared.

    Args:
        model: a Keras model whose variables exist.
        optimizer: the default is the optimizer that the model was compiled with.
        kwargs: plain objects, for example ``batch=0, epoch=0``.

    Raises:
        ValueError: the model is not built, or an attribute has the name of a method.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not getattr(model, "built", False):
            raise ValueError(_MUST_BE_BUILT)
        self.model = model
        self.optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        _make_variables(self.optimizer, model)
        super().__init__(**kwargs)
        self.save()

    def _variables(self) -> Variables:
        shared = list(self.model.weights)
        if self.optimizer is not None:
            variables = self.optimizer.variables
            shared += variables() if callable(variables) else variables
        known = set(map(id, shared))
        own = [each for each in getattr(self.model, "variables", ()) if id(each) not in known]
        return Variables(shared, own)

    def _read(self, variables: Sequence[Any]) -> list[Array]:
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()  # inside fit, Keras on JAX keeps the values outside of the variables
        return contents.views(variables)

    def _write(self, variables: Sequence[Any], arrays: Sequence[Array]) -> None:
        contents.write(variables, arrays)

    def _before_writing(self) -> None:
        if getattr(self.model, "_jax_state", None) is not None:
            self.model._jax_state = None  # after a fit that ended with an exception, these buffers are deleted
            for metric in getattr(self.model, "metrics_variables", ()):
                metric.assign(np.zeros(metric.shape, str(metric.dtype)))


def _make_variables(optimizer: Any, model: Any) -> None:
    """Build the optimizer now, so that all ranks have the same variables."""
    weights = list(model.trainable_variables)
    if optimizer is None:
        return
    if hasattr(optimizer, "build"):
        if not getattr(optimizer, "built", getattr(optimizer, "_built", False)):
            optimizer.build(weights)
    elif hasattr(optimizer, "_create_all_weights"):  # Keras 2's legacy optimizers
        optimizer._create_all_weights(weights)
