"""Makes a model's variables at the beginning of its first training step.

On TensorFlow, Keras makes the variables of a model that is not built only inside this step. On the other backends, it makes
them before ``fit`` calls callbacks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from horovod._keras.loss_scale import is_distributed


def at_first_step(model: Any, wanted: Callable[[], bool], then: Callable[[], None]) -> None:
    """Have ``then`` called in the first training step that ``fit`` makes, before it uses variables, which are made first.

    Call it before ``fit`` makes its function, which keeps the method ``train_step`` that the model has then. Does nothing for a
    model that has trained before, whose function exists.

    A model whose variables cannot be made by a call, because only its ``train_step`` uses its parts, may not have them by then.

    Args:
        model: a model of Keras 3 on TensorFlow, or of Keras 2.
        wanted: is asked in this step. If it returns False, nothing is made, and ``then`` is not called.
        then: is called eagerly.
    """
    step, waiting = model.train_step, [(wanted, then)]

    def first(data: Any) -> Any:
        import tensorflow as tf

        forget(model)
        for wanted, then in [*waiting]:
            if wanted():
                with suppress(Exception):  # the step itself raises what is wrong about the model or the data
                    model(data[0] if isinstance(data, tuple) else data, training=False)
                with tf.init_scope():
                    if not all(tf.raw_ops.VarIsInitializedOp(resource=each.handle) for each in model.weights):
                        continue  # TensorFlow gives values to what is made in a trace after it, and traces once more
                    waiting.clear()
                    then()
        return step(data)

    object.__setattr__(model, "train_step", first)


def forget(model: Any) -> None:
    """Undo :func:`at_first_step`, for functions that are made from now on."""
    vars(model).pop("train_step", None)


def trains_on_tensorflow(model: Any) -> bool:
    """Whether a model of Keras runs on TensorFlow."""
    if not hasattr(model, "train_step"):
        return False
    if not any(kind.__module__.startswith("keras.") for kind in type(model).__mro__):
        return True  # of Keras 2
    import keras

    backend: str = keras.backend.backend()
    return backend == "tensorflow"


def trains_alone(model: Any) -> bool:
    """Whether Keras's own training step applies the gradients of this rank alone."""
    step = getattr(type(model), "train_step", None)
    own = getattr(step, "__module__", "").partition(".")[0] in ("keras", "tf_keras")
    optimizer = getattr(model, "optimizer", None)
    kind = type(optimizer).__module__.partition(".")[0]
    wraps = hasattr(optimizer, "optimizer")  # one of TensorFlow 1, which may be distributed
    return own and kind in ("keras", "tf_keras") and not wraps and not is_distributed(optimizer)
