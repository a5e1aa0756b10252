"""Modules that are imported when something of them is used, and not before."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Later(ModuleType):
    """Stands for a module. Whoever holds it gets everything of the real one."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.real(), name)

    def begin(self) -> None:
        """Called when the module is imported, as far as others can see."""

    def real(self) -> ModuleType:
        """The module itself, imported from now on by everything."""
        return imported(self.__name__)


class LaterModules:
    """Finds a :class:`Later` in place of some modules, until the real one is used, or imported with a submodule."""

    def __init__(self, modules: Mapping[str, type[Later]]) -> None:
        self.modules = dict(modules)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        parent, _, child = name.rpartition(".")
        if parent in self.modules:
            stands = sys.modules.get(parent)
            if isinstance(stands, Later):
                stands.real()
        if name not in self.modules:
            return None
        spec = ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]  # their base classes take 20 ms to import
        spec.submodule_search_locations = [f"{folder}/{child}" for folder in path or ()]
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.modules[spec.name](spec.name)

    def exec_module(self, module: ModuleType) -> None:
        assert isinstance(module, Later)
        module.begin()


def imported(name: str) -> ModuleType:
    """The real module of that name."""
    for finder in sys.meta_path:
        if isinstance(finder, LaterModules) and finder.modules.pop(name, None) is not None:
            sys.modules.pop(name, None)
            parent, _, child = name.rpartition(".")
            vars(sys.modules[parent]).pop(child, None)
    return importlib.import_module(name)


def install(modules: Mapping[str, type[Later]]) -> None:
    """For all imports of this process from now on."""
    sys.meta_path.insert(0, LaterModules(modules))  # type: ignore[arg-type]  # for the same reason
