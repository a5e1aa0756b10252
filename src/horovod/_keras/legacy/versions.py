"""Whether something is of Keras 2 (``tf_keras``), for ``horovod.keras``, whose own Keras is version 3."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any


def legacy_tensorflow_keras() -> Any:
    """TensorFlow's Keras where that is Keras 2, as with ``TF_USE_LEGACY_KERAS=1``; else, or without TensorFlow, None."""
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None:
        return None
    return None if hasattr(tensorflow.keras, "ops") else tensorflow.keras


def of_keras_2(thing: Any, kind: str) -> bool:
    """Whether a thing is of Keras 2, and TensorFlow's Keras is that version.

    Args:
        kind: where its base classes are: ``optimizers`` or ``layers``.
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
    """Whether Keras 2 wrote a saved model: a file that says so, or a folder, which only Keras 2 reads."""
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
