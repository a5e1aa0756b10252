"""XLA and TensorFlow: a collective cannot be part of a step that XLA compiles as a whole.

Keras 3 has XLA compile training steps by itself wherever it finds a GPU (``jit_compile="auto"``). For a model that trains
with a distributed optimizer this is turned off when the step is made, and said once. JAX is not concerned, there
collectives are callbacks in the compiled step; nor is PyTorch, whose compiler stops before them and goes on after them.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

from horovod._keras.loss_scale import unwrapped

_TEXT = (
    "Horovod: this model trains with a DistributedOptimizer, so its training step is not compiled by XLA (which cannot compile "
    "a collective) and runs as an ordinary TensorFlow graph. Say model.compile(..., jit_compile=False) to silence this."
)


@functools.cache
def leave_out_xla(model_class: Any) -> None:
    """Change ``make_train_function`` of Keras's ``Model``, for models with a distributed optimizer. Once per process."""
    make = model_class.make_train_function

    @functools.wraps(make)
    def make_train_function(self: Any, force: bool = False) -> Any:
        if self.jit_compile and not self.run_eagerly and _is_distributed(self.optimizer):
            warnings.warn(_TEXT, stacklevel=3)
            self.jit_compile = False
        return make(self, force)

    model_class.make_train_function = make_train_function


def _is_distributed(optimizer: Any) -> bool:
    return any(hasattr(each, "_horovod") for each in (optimizer, unwrapped(optimizer)))
