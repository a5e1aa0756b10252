"""Copies of Keras 3's optimizers, with their configuration and their state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from horovod._keras import loss_scale


def rebuilt(optimizer: Any, kind: type[Any], from_config: Callable[[Any], Any], passes: int) -> Any:
    """An instance of ``kind`` with the configuration of ``optimizer``, whose gradients accumulate over ``passes`` calls.

    Args:
        from_config: makes the instance from a configuration.

    Schedules, the optimizer inside a ``LossScaleOptimizer`` and the parts of a ``MultiOptimizer`` are passed on unchanged,
    because Keras may not be able to serialize those that a user wrote.
    """
    parts = getattr(optimizer, "_optimizer_map", None)
    if parts is not None:
        if passes > 1:
            raise ValueError(
                f"{type(optimizer).__name__} does not accumulate gradients; use backward_passes_per_step=1, and "
                "gradient_accumulation_steps of its optimizers"
            )
        return kind(parts, loss_scale_factor=optimizer.loss_scale_factor, name=optimizer.name)
    stand_in = object.__new__(type(optimizer))
    stand_in.__dict__.update(vars(optimizer))
    inner = loss_scale.unwrapped(optimizer)
    if inner is not optimizer:
        object.__setattr__(stand_in, "inner_optimizer", keras.optimizers.SGD())
        config = stand_in.get_config()
        del config["inner_optimizer"]
        return kind(rebuilt(inner, type(inner), type(inner).from_config, passes), **config)
    rate = getattr(optimizer, "_learning_rate", None)
    if callable(rate):
        # A tensor, because Keras before 3.6 does not serialize a plain number.
        object.__setattr__(stand_in, "_learning_rate", keras.ops.convert_to_tensor(0.5))
    config = stand_in.get_config()
    if callable(rate):
        config["learning_rate"] = rate
    steps = optimizer.gradient_accumulation_steps
    if passes > 1:
        if steps and steps != passes:
            raise ValueError(
                f"the optimizer has gradient_accumulation_steps={steps}, but backward_passes_per_step={passes}; set one of them"
            )
        config["gradient_accumulation_steps"] = passes
    return from_config(config)


def copy_exclusions(original: Any, made: Any) -> None:
    """Copy the variables passed to ``exclude_from_weight_decay``, which the configuration does not contain."""
    for name, value in vars(original).items():
        if name.startswith("_exclude_from_weight_decay") and not name.endswith("_cache"):
            setattr(made, name, value)


def copy_state(original: Any, made: Any) -> None:
    """Copy the values of the optimizer's variables, by their paths."""
    if original.built:
        made.build(list(original._trainable_variables))
    state = {variable.path: variable for variable in original.variables}
    for variable in made.variables:
        source = state.get(variable.path)
        if source is not None and source.shape == variable.shape:
            variable.assign(source.numpy())


def without_horovod(optimizer: Any) -> Any:
    """An optimizer of the wrapped class with the variables of a distributed one."""
    kind = type(optimizer).__bases__[1]
    plain: Any = object.__new__(kind)
    plain.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "_horovod"})
    return plain
