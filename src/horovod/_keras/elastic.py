"""What ``horovod.keras.elastic`` and ``horovod.tensorflow.keras.elastic`` share: the state of a model, and callbacks.

Works for Keras 3 on any backend and for Keras 2. The callbacks come without the base class that each version of Keras gives
them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from horovod._keras import contents
from horovod.comm.datatypes import Array
from horovod.elastic.failures import converting
from horovod.elastic.loop import run_fn
from horovod.elastic.rounds import Reset
from horovod.elastic.state import State
from horovod.elastic.variables import Variables, VariablesState

_Result = TypeVar("_Result")

_MUST_BE_BUILT = "Model must be built first. Run `model.build(input_shape)`."


class ModelState(VariablesState):
    """The state of an elastic job that trains a Keras model: the model, its optimizer and plain objects.

    All ranks make it with the same attributes. The weights of the model and the variables of the optimizer become those of
    one rank at the start of a round; states of random generators stay each rank's own.

    Args:
        model: a Keras model whose variables exist.
        optimizer: default: the one that the model was compiled with.
        kwargs: plain objects, for example ``batch=0, epoch=0``.

    Raises:
        ValueError: the model is not built; or an attribute would hide a method.
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
            self.model.jax_state_sync()  # inside fit, values are elsewhere
        return contents.views(variables)

    def _write(self, variables: Sequence[Any], arrays: Sequence[Array]) -> None:
        contents.write(variables, arrays)

    def _before_writing(self) -> None:
        if getattr(self.model, "_jax_state", None) is not None:
            self.model._jax_state = None  # of a fit that ended with an exception: JAX has given its buffers away
            for metric in getattr(self.model, "metrics_variables", ()):
                metric.assign(np.zeros(metric.shape, str(metric.dtype)))


def _make_variables(optimizer: Any, model: Any) -> None:
    """Have an optimizer make its variables now, so that all ranks have the same ones."""
    weights = list(model.trainable_variables)
    if optimizer is None:
        return
    if hasattr(optimizer, "build"):
        if not getattr(optimizer, "built", getattr(optimizer, "_built", False)):
            optimizer.build(weights)
    elif hasattr(optimizer, "_create_all_weights"):  # Keras 2's legacy optimizers
        optimizer._create_all_weights(weights)


def runtime_errors() -> tuple[type[BaseException], ...]:
    """The errors with which the frameworks in use report that something in a graph has failed."""
    kinds: list[type[BaseException]] = []
    if (tensorflow := sys.modules.get("tensorflow")) is not None:
        kinds.append(tensorflow.errors.OpError)
    if (jax := sys.modules.get("jax")) is not None:
        kinds.append(jax.errors.JaxRuntimeError)
    return tuple(kinds)


def make_run(
    shutdown: Callable[[], None], init: Callable[[], None]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The ``run`` of a binding."""

    def run(func: Callable[..., _Result]) -> Callable[..., _Result]:
        """Decorate a training function so that it goes on when ranks are lost, added or removed.

        Its first argument is the state. See :func:`horovod.elastic.loop.run_fn`. Errors with which TensorFlow or JAX report
        a failed collective are recognised.
        """
        return run_fn(converting(func, *runtime_errors()), Reset(shutdown, init))

    return run


class CommitState:
    """Commit the state every ``batches_per_commit`` batches, and at the end of each epoch.

    Put it last, so that it commits what the other callbacks have set.

    Args:
        state: the state.
        batches_per_commit: how many batches a failure may cost.

    Raises:
        ValueError: less than one batch.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        if batches_per_commit < 1:
            raise ValueError(f"batches_per_commit={batches_per_commit}: must be at least 1")
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        self.batches_remaining = self.batches_per_commit

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.batches_remaining = self.batches_per_commit
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.batches_remaining = self.batches_per_commit
        self.state.commit()


class UpdateBatchState:
    """Keep ``state.batch`` at the number of the batch within the epoch, from 0; 0 at the end of an epoch.

    Where ``fit`` begins with ``state.batch`` above 0, its first epoch is the rest of one: batches are counted on from there,
    and the progress bar expects so many fewer. ``fit`` itself makes as many steps as its data has, so give it the rest:
    ``dataset.skip(state.batch)``.

    Args:
        state: a state with an attribute ``batch``.
    """

    params: Any

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._done_before = 0
        self._all_steps: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self._done_before = self.state.batch
        self._all_steps = None
        if self._done_before and (self.params or {}).get("steps"):
            self._all_steps = self.params["steps"]
            self.params["steps"] = max(0, self._all_steps - self._done_before)

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = self._done_before + batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = self._done_before = 0
        if self._all_steps is not None:
            self.params["steps"], self._all_steps = self._all_steps, None


class UpdateEpochState:
    """Keep ``state.epoch`` at the number of epochs that are complete, over all calls of ``fit``.

    Args:
        state: a state with an attribute ``epoch``.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch
        self._first: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self.initial_epoch = self.state.epoch
        self._first = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._first is None:
            self._first = epoch  # 0, or what fit was given as initial_epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = self.initial_epoch + epoch - (self._first or 0) + 1
