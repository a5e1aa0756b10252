"""Elastic training with TensorFlow in a custom loop.

Every rank runs a script with these lines::

    @hvd.elastic.run
    def train(state):
        for state.batch in range(state.batch, 1000):
            step(*next(batches))
            state.commit()

    train(hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from horovod._models import contents
from horovod._models.state import ModelState
from horovod.comm.datatypes import Array
from horovod.elastic.failures import converting
from horovod.elastic.loop import run_fn
from horovod.elastic.rounds import Reset
from horovod.elastic.variables import Variables, VariablesState
from horovod.tensorflow.lifecycle import init, shutdown

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]

_Result = TypeVar("_Result")


def run(func: Callable[..., _Result]) -> Callable[..., _Result]:
    """Decorate a training function so that it continues when ranks are lost, added or removed.

    Its first argument is the state. See :func:`horovod.elastic.loop.run_fn`. The errors with which TensorFlow reports a
    failed collective of a graph are recognised. Its other errors are raised.
    """
    return run_fn(converting(func, (tf.errors.OpError,), (tf.errors.CancelledError,)), Reset(shutdown, init))


class TensorFlowKerasState(ModelState):
    """The state of an elastic job that trains a Keras model in a custom loop.

    Every rank must make it with the same attributes. See :class:`horovod._models.state.ModelState`.

    Args:
        model: a Keras model that is built.
        optimizer: the default is the optimizer that the model was compiled with.
        backend: accepted for compatibility.
        kwargs: plain objects, for example ``batch=0``.

    Raises:
        ValueError: the model is not built, or an attribute has the name of a method.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)


class TensorFlowState(VariablesState):
    """The state of an elastic job: TensorFlow variables and plain objects.

    Every rank must make it with variables of the same shapes in the same order. It broadcasts the values of rank 0.

    Args:
        variables: the variables. The default is all global variables of the graph (TensorFlow 1).
        session: the session that holds them (TensorFlow 1).
        kwargs: plain objects, for example ``batch=0``.

    Raises:
        ValueError: ``variables`` is missing in eager execution, which keeps no list of all variables, or an attribute has the
            name of a method.
    """

    def __init__(self, variables: Any = None, session: Any = None, **kwargs: Any) -> None:
        if variables is None and tf.executing_eagerly():
            raise ValueError(
                "TensorFlowState: pass variables=, a list of tf.Variable; eager execution keeps no list of all of them"
            )
        self.variables = list(tf.compat.v1.global_variables() if variables is None else variables)
        self.session = session
        self._assignments: list[Any] = []
        super().__init__(**kwargs)
        self.sync()
        self._progress.rounds = 0  # this first sync is not a round of training

    def _variables(self) -> Variables:
        return Variables(self.variables)

    def _read(self, variables: Sequence[Any]) -> list[Array]:
        if self.session is None:
            return contents.views(variables)
        return [self.session.run(each) for each in variables]

    def _write(self, variables: Sequence[Any], arrays: Sequence[Array]) -> None:
        if self.session is None:
            contents.write(variables, arrays)
            return
        if not self._assignments:
            with self.session.graph.as_default():
                for variable in self.variables:
                    value = tf.compat.v1.placeholder(variable.dtype.base_dtype, variable.shape)
                    self._assignments.append((value, tf.compat.v1.assign(variable, value)))
        values = {placeholder: array for (placeholder, _), array in zip(self._assignments, arrays, strict=True)}
        self.session.run([operation for _, operation in self._assignments], values)
