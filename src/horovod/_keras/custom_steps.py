"""``hvd.reduce_gradients``: for custom training steps that change gradients before they apply them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from horovod._keras.loss_scale import unwrapped


def reduce_gradients(
    optimizer: Any, gradients: Iterable[Any], trainable_variables: Iterable[Any] | None = None
) -> list[Any]:
    """Reduce gradients as a distributed optimizer would, for a step that changes them before it applies them.

    The next ``apply`` or ``apply_gradients`` of the optimizer does not reduce its gradients again. So clipping uses the
    gradients of the whole job, as in one process::

        gradients = tape.gradient(loss, variables)
        gradients = hvd.reduce_gradients(optimizer, gradients, variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
        optimizer.apply_gradients(zip(gradients, variables))

    Every member of the optimizer's process set must call it. Call it in the function that applies the gradients, so that both
    are compiled together. On PyTorch, ``gradients`` themselves also get the result, so clipping the parameters' gradients in
    place works.

    Args:
        optimizer: a distributed optimizer, or a ``LossScaleOptimizer`` around one. Its gradients are scaled.
        gradients: the gradients of this rank, in the order of the variables. None for a variable that has none.
        trainable_variables: the default is all variables of the optimizer.

    Returns:
        The reduced gradients, including those that only other ranks have.

    Raises:
        ValueError: the optimizer is not distributed, or not built and ``trainable_variables`` is not given.
    """
    owner = next((each for each in (optimizer, unwrapped(optimizer)) if hasattr(each, "_horovod")), None)
    if owner is None:
        raise ValueError(
            f"hvd.reduce_gradients takes an optimizer of hvd.DistributedOptimizer, not a plain {type(optimizer).__name__}"
        )
    found = list(gradients)
    variables = None if trainable_variables is None else list(trainable_variables)
    if variables is not None and not all(hasattr(each, "assign") for each in variables):
        variables = None  # a stateless step of JAX has the values of variables instead
    if variables is None:
        if not getattr(owner, "built", False):
            raise ValueError(
                "the optimizer is not built yet: pass trainable_variables, or call optimizer.build(variables)"
            )
        variables = list(owner._trainable_variables)
    if len(variables) != len(found):
        raise ValueError(f"there are {len(found)} gradients for {len(variables)} variables")
    reduced: list[Any] = owner._horovod.reduce_for_script(found, variables)
    return reduced
