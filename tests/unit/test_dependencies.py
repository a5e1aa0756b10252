"""What the project says it needs is what it imports, and its version is one that scripts for Horovod ask for."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

import horovod

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no parser of TOML")

ROOT = Path(__file__).resolve().parents[2]
MODULES = {"PyYAML": "yaml"}
"""Packages whose modules have another name."""
BROUGHT_BY_FRAMEWORKS = {"h5py": "keras", "jax": "keras", "tf_keras": "tensorflow"}
"""Modules that are imported only where a framework is in use that needs them itself, or was told to use them."""


def imported() -> dict[str, set[str]]:
    """By module that is neither the standard library's nor ours, the files that import it."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names.append(node.module or "")
            for name in names:
                found.setdefault(name.partition(".")[0], set()).add(str(path.relative_to(ROOT)))
    return {name: files for name, files in found.items() if name not in {*sys.stdlib_module_names, "horovod"}}


def modules_of(requirements: list[str]) -> set[str]:
    names = [re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in requirements]
    return {MODULES.get(name, name) for name in names}


def test_every_dependency_is_imported_and_the_other_way_round() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = modules_of(project["dependencies"])
    extras = project["optional-dependencies"]
    rooms = [ROOT / "src" / "horovod", ROOT / "src" / "horovod" / "comm"]
    optional = [name for name in extras if any((room / name).is_dir() for room in rooms)]
    frameworks = modules_of([each for name in optional for each in extras[name]])
    found = imported()
    assert needed <= found.keys(), f"declared, and imported nowhere: {needed - found.keys()}"
    undeclared = {
        name: sorted(files)
        for name, files in found.items()
        if name not in needed | frameworks and BROUGHT_BY_FRAMEWORKS.get(name) not in frameworks
    }
    assert not undeclared, f"imported, and not declared: {undeclared}"


def test_the_version_meets_what_scripts_require() -> None:
    """Their requirements ask for horovod>=0.28, the last version of the other Horovod."""
    major, minor = map(int, horovod.__version__.split(".")[:2])
    assert (major, minor) >= (0, 28)
