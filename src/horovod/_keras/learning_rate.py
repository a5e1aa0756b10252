"""Reads and sets an optimizer's learning rate, and corrects momentum when the rate changes. For Keras 3 and Keras 2."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod._keras.loss_scale import unwrapped
from horovod._models import contents


def get(optimizer: Any) -> float:
    """The current learning rate."""
    rate = unwrapped(optimizer).learning_rate
    if callable(rate) and not hasattr(rate, "numpy"):
        rate = rate(unwrapped(optimizer).iterations)
    return float(np.asarray(contents.read([rate])[0] if hasattr(rate, "numpy") else rate))


def put(optimizer: Any, rate: float) -> None:
    """Set the learning rate.

    Raises:
        TypeError: the optimizer has a learning-rate schedule.
    """
    unwrapped(optimizer).learning_rate = rate


def carry_momentum(optimizer: Any, factor: float) -> None:
    """Adapt the accumulated momentum to a learning rate that is ``factor`` times the old one.

    Keras keeps ``v = momentum * v - rate * gradient``, so ``v`` is a multiple of the old rate. Goyal et al. 2017 (Accurate,
    Large Minibatch SGD, section 2.1, remark 2) multiply the momentum of one step by ``factor``. Momentum is a constant in
    a compiled step, but ``v`` is a variable, and multiplying ``v`` has the same effect. Optimizers that keep no ``v``
    are not changed.
    """
    velocities = _velocities(unwrapped(optimizer))
    contents.write(velocities, [each * np.asarray(factor, each.dtype) for each in contents.read(velocities)])


def _velocities(optimizer: Any) -> list[Any]:
    if not hasattr(optimizer, "momentum"):
        return []
    for name in ("momentums", "_momentums"):  # SGD, RMSprop
        if hasattr(optimizer, name):
            return [each for each in getattr(optimizer, name) if each is not None]
    if hasattr(optimizer, "get_slot_names") and "momentum" in optimizer.get_slot_names():  # Keras 2's legacy optimizers
        return [each for each in optimizer.variables() if "/momentum" in each.name]
    return []
