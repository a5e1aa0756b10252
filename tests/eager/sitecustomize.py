"""Spares processes that tests launch PyTorch's compiler, which PyTorch imports with the first optimizer and with
DistributedDataParallel: that takes as long as importing PyTorch itself.

A Python process imports this module at its start if PYTHONPATH names this folder. A script that compiles nothing then gets, of
``torch._dynamo``, only what such a script calls. Whatever else it uses of it, or of its submodules, imports the real one. What
else spares it time is in ``framework_imports``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import framework_imports

NAME = "torch._dynamo"


class Submodule:
    """The functions of a submodule that eager code calls. The others are those of the real one."""

    def __init__(self, name: str, **functions: Callable[..., Any]) -> None:
        self._name = name
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(real(), self._name), name)


class NoCompiler(ModuleType):
    """What eager code calls of ``torch._dynamo``: nothing is compiled, so nothing is kept from being compiled."""

    utils = Submodule("utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")
    trace_rules = Submodule("trace_rules", clear_lru_cache=lambda: None)

    @staticmethod
    def disable(fn: Any, recursive: bool = True, **_: Any) -> Any:
        return fn

    @staticmethod
    def graph_break() -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(real(), name)


class WithoutCompiler(MetaPathFinder, Loader):
    """Finds :class:`NoCompiler` in place of ``torch._dynamo``, until the real one is used."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == NAME:
            spec = ModuleSpec(name, self, is_package=True)
            spec.submodule_search_locations = [f"{folder}/_dynamo" for folder in path or ()]
            return spec
        if name.startswith(f"{NAME}."):
            real()
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return NoCompiler(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def real() -> ModuleType:
    """The compiler itself, imported from now on by everything."""
    if finder in sys.meta_path:
        sys.meta_path.remove(finder)
        sys.modules.pop(NAME, None)
        vars(sys.modules["torch"]).pop("_dynamo", None)
    return importlib.import_module(NAME)


framework_imports.install()
finder = WithoutCompiler()
sys.meta_path.insert(0, finder)
