"""Imports run one way: every package imports only what stands below it in the table."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "horovod"

LAYERS = [
    {"__init__"},
    {"keras"},
    {"tensorflow"},
    {"_keras"},
    {"torch", "mxnet"},
    {"common.elastic"},
    {"elastic"},
    {"runner", "common"},
    {"core", "environments"},
    {"comm", "control", "observe"},
    {"core.config"},
]
"""From the top. A package may import every package of a lower layer, none of its own layer, and none of a higher one."""

LAZY = {("common", "tensorflow"), ("_keras", "tensorflow")}
"""May be imported inside of a function, though not when the importing module is imported."""

KNOWN = {("_keras", "tensorflow")}
"""Imports against the order that are still to be removed. Delete an entry with the last import that needs it."""


def layer(package: str) -> int:
    return next(number for number, packages in enumerate(LAYERS) if package in packages)


def package_of(module: str) -> str:
    """The entry of the table that a module under ``horovod`` belongs to; its name as after ``horovod.``."""
    if module == "core.config" or module.startswith("core.config."):
        return "core.config"
    if module == "common.elastic" or module.startswith("common.elastic."):  # an old import path, and nothing else
        return "common.elastic"
    return module.partition(".")[0]


def imports(tree: ast.AST, lazy: bool = False) -> Iterator[tuple[str, bool]]:
    """Each module under ``horovod`` that is imported, without that prefix, and whether inside of a function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for other in node.orelse:
                yield from imports(other, lazy)
            continue
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.startswith("horovod.") and name.partition(".")[2] != "__version__":
                yield name.removeprefix("horovod."), lazy
        yield from imports(node, lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def edges() -> dict[tuple[str, str], set[str]]:
    """Each import against the order as (importing package, imported package), with the files."""
    found: dict[tuple[str, str], set[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        own = package_of(module)
        for imported, lazy in imports(ast.parse(path.read_text())):
            edge = own, package_of(imported)
            if edge[0] == edge[1] or layer(edge[0]) < layer(edge[1]):
                continue
            if lazy and edge in LAZY:
                continue
            found.setdefault(edge, set()).add(str(path.relative_to(SOURCE)))
    return found


def test_every_package_has_a_place_in_the_table() -> None:
    packages = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    listed = {package for packages in LAYERS for package in packages if "." not in package}
    assert packages == listed


def test_imports_run_one_way() -> None:
    wrong = {edge: files for edge, files in edges().items() if edge not in KNOWN}
    assert not wrong, f"imports against the order: {wrong}"


def test_every_known_exception_is_still_needed() -> None:
    """One that is not would hide the next import of its kind."""
    gone = {edge for edge in KNOWN if edge not in edges()}
    assert not gone, f"delete from KNOWN: {gone}"


@pytest.mark.parametrize("module", ["horovod", "horovod.common.basics", "horovod.runner"])
def test_importing_the_package_imports_no_framework(module: str) -> None:
    frameworks = ["torch", "tensorflow", "keras", "mxnet", "jax"]
    program = f"import sys, {module}; print([name for name in {frameworks} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_the_package_does_not_import_the_launcher() -> None:
    program = "import sys, horovod; print('horovod.runner' in sys.modules, callable(horovod.run))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "True"]
