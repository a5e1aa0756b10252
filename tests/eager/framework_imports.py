"""Makes the import of a framework cost less processor time: half of that of PyTorch, and a third of that of TensorFlow.

While a framework is imported, the garbage collector is off: it would look through some hundred thousand objects again and
again, and find nothing. Afterwards it leaves them alone, also at the end of the process. What a script makes itself is
collected as ever, except in the end what is in cycles that its globals hold. So some tests start processes without this: the
program of the README, that of docs/notebooks.md, and a script of ``tests/parallel/tensorflow/test_scripts.py``.

What TensorFlow and Keras import only because it is installed beside them, for functions that no test uses, is missing for them.
Others can import it.

Imported in processes that tests launch (``sitecustomize``), in those that ranks are forked from, and in pytest's own.
"""

from __future__ import annotations

import gc
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType
from typing import Any

FRAMEWORKS = {"accelerate", "jax", "keras", "lightning", "sklearn", "tensorflow", "tf_keras", "torch", "transformers"}
MISSING = {
    "IPython": ("keras.src.",),
    "huggingface_hub": ("keras.src.",),
    "jax": ("keras.src.callbacks.", "tensorflow.lite."),
    "matplotlib": ("keras.src.",),
    "requests": ("tensorflow.python.keras.",),
    "scipy": ("tensorflow.python.keras.",),
    "sklearn": ("keras.src.",),
}
"""For whom a package is missing: how the names of the modules begin that import it."""


class Frameworks:
    """Finds frameworks as ever, and what is missing for some not at all."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name in MISSING and _importer(sys._getframe(1)).startswith(MISSING[name]):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        spec = PathFinder.find_spec(name, path) if name in FRAMEWORKS else None
        if spec is not None and spec.loader is not None:
            _uncollected(spec.loader)
        return spec


def install() -> None:
    """For all imports of this process from now on."""
    if not any(isinstance(finder, Frameworks) for finder in sys.meta_path):
        sys.meta_path.insert(0, Frameworks())  # type: ignore[arg-type]  # its base class takes 20 ms to import


def _importer(frame: FrameType | None) -> str:
    """The name of the module that imports."""
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__"))


def _uncollected(loader: Any) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        if not gc.isenabled():  # another framework is importing this one
            execute(module)
            return
        gc.disable()
        try:
            execute(module)
        finally:
            gc.freeze()
            gc.enable()

    loader.exec_module = exec_module
