"""Checks whether objects and files are of Keras 2 (``tf_keras``). ``horovod.keras`` itself imports Keras 3."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any


def legacy_tensorflow_keras() -> Any:
    """TensorFlow's Keras if it is Keras 2, as with ``TF_USE_LEGACY_KERAS=1``. Otherwise, or without TensorFlow, None."""
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None:
        return None
    return None if hasattr(tensorflow.keras, "ops") else tensorflow.keras


def of_keras_2(thing: Any, kind: str) -> bool:
    """Whether an object is of Keras 2, and TensorFlow's Keras is Keras 2.

    Args:
        kind: the module of its base classes, ``optimizers`` or ``layers``.
    """
    keras = legacy_tensorflow_keras()
    if keras is None:
        return False
    known = {
        "optimizers": (keras.optimizers.Optimizer, keras.optimizers.legacy.Optimizer),
        "layers": (keras.layers.Layer,),
    }
    return isinstance(thing, known[kind])


def saved_by_keras_2(filepath: Any) -> bool:
    """Whether Keras 2 wrote a saved model. A file contains the version. A folder is always of Keras 2."""
    if Path(filepath).is_dir():
        return True
    if zipfile.is_zipfile(filepath):
        with zipfile.ZipFile(filepath) as archive:
            version = json.loads(archive.read("metadata.json"))["keras_version"]
    else:
        import h5py

        with h5py.File(filepath) as file:
            version = file.attrs.get("keras_version", "")
    return str(version).startswith("2")
