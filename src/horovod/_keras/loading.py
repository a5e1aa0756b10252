"""``load_model``: loads a saved model and makes its optimizer distributed, whether or not it was saved as distributed."""

from __future__ import annotations

import os
from typing import Any

import keras

from horovod._keras.loss_scale import is_distributed, unwrapped
from horovod._keras.optimizer import distribute_in_place
from horovod._keras.settings import KerasSettings, users_objects


def load(filepath: Any, custom_optimizers: Any, custom_objects: Any, settings: KerasSettings) -> Any:
    """Load a model with Keras 3, and make its optimizer distributed. The optimizer keeps its state."""
    model = keras.models.load_model(filepath, custom_objects=users_objects(custom_optimizers, custom_objects))
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return model
    if optimizer.built and not unwrapped(optimizer)._trainable_variables and model.trainable_variables:
        _restore_from_hdf5(optimizer, model, os.fspath(filepath))
    if not is_distributed(optimizer):
        distribute_in_place(unwrapped(optimizer), settings)
    return model


def _restore_from_hdf5(optimizer: Any, model: Any, path: str) -> None:
    """Load the optimizer's state from a ``.h5`` file.

    Keras 3 (seen in 3.15) builds the optimizers of such files without variables, so that they cannot train.
    """
    import h5py

    inner = unwrapped(optimizer)
    inner.built = False
    inner.build(model.trainable_variables)
    if inner is not optimizer:
        keras.optimizers.Optimizer.build(optimizer, model.trainable_variables)
    with h5py.File(path) as file:
        group = file["optimizer_weights"]
        values = [group[name][()] for name in group.attrs["weight_names"]]
    for variable, value in zip(optimizer.variables, values, strict=True):
        variable.assign(value)
