"""Turns off XLA for distributed training steps on TensorFlow: XLA cannot compile a collective.

Keras 3 compiles training steps with XLA by default if there is a GPU (``jit_compile="auto"``). For a model with a distributed
optimizer this is turned off when the step is built, with one warning. JAX needs no such change, because its collectives are
callbacks in the compiled step. PyTorch does not either, because its compiler splits the graph at a collective.
"""

from __future__ import annotations

import functools
from typing import Any

from horovod._keras.loss_scale import is_distributed
from horovod.observe.call_site import warn

_TEXT = (
    "Horovod: this model trains with a DistributedOptimizer, so its training step is not compiled by XLA (which cannot compile "
    "a collective) and runs as an ordinary TensorFlow graph. Call model.compile(..., jit_compile=False) to silence this."
)


@functools.cache
def turn_off_xla(model_class: Any) -> None:
    """Patch ``make_train_function`` of Keras's ``Model``, once per process, for models with a distributed optimizer."""
    make = model_class.make_train_function

    @functools.wraps(make)
    def make_train_function(self: Any, force: bool = False) -> Any:
        if self.jit_compile and not self.run_eagerly and is_distributed(self.optimizer):
            warn(_TEXT)
            self.jit_compile = False
        return make(self, force)

    model_class.make_train_function = make_train_function
