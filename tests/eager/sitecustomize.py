"""Spares processes that tests launch PyTorch's compiler, which PyTorch imports with the first optimizer and with
DistributedDataParallel: that takes as long as importing PyTorch itself. Also the shapes of results, a quarter of importing
PyTorch, which the compiler and tensors without data use, what exports models, and distributions, a tenth together, and a second
list of all that TensorFlow has, a tenth of importing it.

A Python process imports this module at its start if PYTHONPATH names this folder. A script that compiles nothing then gets, of
``torch._dynamo``, only what such a script calls. Whatever else it uses of it, or of its submodules, imports the real one. What
else spares it time is in ``framework_imports``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import framework_imports
import later

COMPILER = "torch._dynamo"
SHAPES = "torch._meta_registrations"
UNUSED = ("torch.export", "torch.distributions", "tensorflow._api.v2.compat.v1.compat")


class Submodule:
    """The functions of a submodule that eager code calls. The others are those of the real one."""

    def __init__(self, name: str, **functions: Callable[..., Any]) -> None:
        self._name = name
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(compiler(), self._name), name)


class Compiled(type):
    """Of the class of compiled modules: what is none can be said without importing it."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return type(instance).__module__.startswith(COMPILER) and isinstance(instance, compiler().OptimizedModule)


class NoCompiler(later.Later):
    """What eager code uses of ``torch._dynamo``: nothing is compiled, so nothing is kept from being compiled."""

    class OptimizedModule(metaclass=Compiled): ...

    utils = Submodule("utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")
    trace_rules = Submodule("trace_rules", clear_lru_cache=lambda: None)

    @staticmethod
    def disable(fn: Any = None, recursive: bool = True, **_: Any) -> Any:
        return (lambda function: function) if fn is None else fn

    @staticmethod
    def graph_break() -> None:
        pass

    def real(self) -> ModuleType:
        return compiler()


class NoShapes(later.Later):
    """Eager code uses nothing of the module itself, and one statement of those that it imports."""

    def begin(self) -> None:
        import torch

        # From PyTorch 2.13 on, torch.Generator() is an error without it.
        if hasattr(torch._C, "_set_generator_metaclass"):
            from torch._opaque_base import OpaqueBaseMeta

            torch._C._set_generator_metaclass(OpaqueBaseMeta)


def compiler() -> ModuleType:
    """The compiler itself, and what it uses, imported from now on by everything."""
    later.imported(SHAPES)
    return later.imported(COMPILER)


framework_imports.install()
later.install({COMPILER: NoCompiler, SHAPES: NoShapes, **dict.fromkeys(UNUSED, later.Later)})
