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
    {"keras", "tensorflow.keras"},
    {"_keras"},
    {"tensorflow", "torch", "mxnet"},
    {"_models"},
    {"common.elastic"},
    {"elastic"},
    {"runner", "common"},
    {"core", "environments"},
    {"comm", "control", "observe"},
    {"core.config"},
]
"""From the top. A package may import every package of a lower layer, none of its own layer, and none of a higher one."""


def layer(package: str) -> int:
    return next(number for number, packages in enumerate(LAYERS) if package in packages)


def package_of(module: str) -> str:
    """The entry of the table that a module under ``horovod`` belongs to; its name as after ``horovod.``."""
    listed = [package for packages in LAYERS for package in packages if f"{module}.".startswith(f"{package}.")]
    return max(listed, key=len, default=module.partition(".")[0])


def imports(tree: ast.AST) -> Iterator[str]:
    """Each module under ``horovod`` that is imported, without that prefix."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for other in node.orelse:
                yield from imports(other)
            continue
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.startswith("horovod.") and name.partition(".")[2] != "__version__":
                yield name.removeprefix("horovod.")
        yield from imports(node)


def edges() -> dict[tuple[str, str], set[str]]:
    """Each import against the order, also inside of a function, as (importing package, imported package), with the files."""
    found: dict[tuple[str, str], set[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        own = package_of(module)
        for imported in imports(ast.parse(path.read_text())):
            edge = own, package_of(imported)
            if edge[0] == edge[1] or layer(edge[0]) < layer(edge[1]):
                continue
            found.setdefault(edge, set()).add(str(path.relative_to(SOURCE)))
    return found


def test_every_package_has_a_place_in_the_table() -> None:
    packages = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    listed = {package for packages in LAYERS for package in packages if "." not in package}
    assert packages == listed


def test_imports_run_one_way() -> None:
    wrong = edges()
    assert not wrong, f"imports against the order: {wrong}"


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


def test_the_runtime_starts_without_what_only_its_reports_need() -> None:
    """Packages' metadata come with the package email: a tenth of what a rank imports before it can call init()."""
    program = "import sys, horovod.common.basics; print('importlib.metadata' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
