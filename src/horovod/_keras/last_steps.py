"""Keeps the last steps of an epoch, which Keras before 3.7 loses on TensorFlow with ``steps_per_execution=n``.

These versions run n steps in one graph. If the data end within the n steps, TensorFlow cancels the operations that run,
including collectives of the steps before the end. Their gradients are not applied. For a model with a distributed optimizer,
Keras therefore builds a graph of one step, which is called n times.
"""

from __future__ import annotations

import functools
from typing import Any

from horovod._keras.loss_scale import is_distributed
from horovod.common.util import is_version_greater_equal_than


def loses_last_steps(keras_version: str) -> bool:
    """Whether this version of Keras loses the last steps."""
    return not is_version_greater_equal_than(keras_version, "3.7.0")


@functools.cache
def patch_train_function(model_class: Any) -> None:
    """Patch ``make_train_function`` of Keras's ``Model``, once per process, for models with a distributed optimizer."""
    make = model_class.make_train_function

    @functools.wraps(make)
    def make_train_function(self: Any, force: bool = False) -> Any:
        steps = self.steps_per_execution
        made_already = self.train_function is not None and not force
        if steps == 1 or made_already or self.run_eagerly or not is_distributed(self.optimizer):
            return make(self, force)
        self.steps_per_execution = 1
        try:
            make(self, force)
        finally:
            self.steps_per_execution = steps
        step = self.train_function

        def train_function(iterator: Any) -> Any:
            for _ in range(steps):
                logs = step(iterator)
            return logs

        self.train_function = train_function
        return None

    model_class.make_train_function = make_train_function
