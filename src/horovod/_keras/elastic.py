"""``run`` and the callbacks of ``horovod.keras.elastic`` and ``horovod.tensorflow.keras.elastic``.

This works for Keras 3 on any backend and for Keras 2. The two modules add the base class of their version of Keras to the
callbacks. The state of a model is in :mod:`horovod._models.state`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from horovod.elastic.failures import Kinds, converting
from horovod.elastic.loop import run_fn
from horovod.elastic.rounds import Reset
from horovod.elastic.state import State

_Result = TypeVar("_Result")


def runtime_errors() -> tuple[Kinds, Kinds]:
    """The errors by which the imported frameworks report a failed operation of a graph, and a cancelled one."""
    failed: list[type[BaseException]] = []
    cancelled: list[type[BaseException]] = []
    if (tensorflow := sys.modules.get("tensorflow")) is not None:
        failed.append(tensorflow.errors.OpError)
        cancelled.append(tensorflow.errors.CancelledError)
    if (jax := sys.modules.get("jax")) is not None:
        failed.append(jax.errors.JaxRuntimeError)
    return tuple(failed), tuple(cancelled)


def make_run(
    shutdown: Callable[[], None], init: Callable[[], None]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make ``hvd.elastic.run`` of a binding."""

    def run(func: Callable[..., _Result]) -> Callable[..., _Result]:
        """Decorate a training function so that it continues when ranks are lost, added or removed.

        Its first argument is the state. See :func:`horovod.elastic.loop.run_fn`. The errors with which TensorFlow and JAX
        report a failed collective are recognised.
        """
        return run_fn(converting(func, *runtime_errors()), Reset(shutdown, init))

    return run


class CommitState:
    """Commit the state every ``batches_per_commit`` batches, and at the end of each epoch.

    Put it last in the list, so that it commits what the other callbacks have set.

    Args:
        state: the state that is committed.
        batches_per_commit: the number of batches between two commits, which is the most that a failure discards.

    Raises:
        ValueError: ``batches_per_commit`` is less than 1.
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
    """Set ``state.batch`` to the number of the batch within the epoch, from 0. It is 0 at the end of an epoch.

    If ``state.batch`` is above 0 when ``fit`` begins, the first epoch is the rest of an interrupted one. Batches are counted
    from ``state.batch``, and the progress bar expects fewer of them. ``fit`` makes as many steps as its data has, so pass it
    the rest: ``dataset.skip(state.batch)``.

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
    """Set ``state.epoch`` to the number of completed epochs, over all calls of ``fit``.

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
            self._first = epoch  # 0, or the argument initial_epoch of fit

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = self.initial_epoch + epoch - (self._first or 0) + 1
