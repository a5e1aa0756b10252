"""What the project says it needs is what it imports, and its version is one that scripts for Horovod ask for."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import horovod

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no parser of TOML")

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
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
    project = PROJECT["project"]
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


@pytest.mark.parametrize("wanted", [">=0.28", "==0.28.1", "<0.29", "~=0.28.0", ">=0.24.0,!=0.28.0"])
def test_the_version_meets_what_scripts_require(wanted: str) -> None:
    """Requirements name versions of the interface; both the package's and the distribution's meet them."""
    info = horovod.build_info()
    assert SpecifierSet(wanted).contains(horovod.__version__)
    assert SpecifierSet(wanted).contains(info["version"])


def test_the_version_of_the_distribution_is_a_build_of_the_interface() -> None:
    info = horovod.build_info()
    assert info["interface"] == horovod.__version__ == Version(info["version"]).public
    assert re.fullmatch(r"pure\.\d+", str(Version(info["version"]).local))
    source = PROJECT["tool"]["hatch"]["version"]["path"]
    assert Path(info["path"]) in (ROOT / source).parents, "pyproject.toml takes the version from what is imported"
    found = re.findall(r'(?m)^(?:__version__|VERSION) *= *"(.+)"', (ROOT / source).read_text())  # as its backend does
    assert found == [info["version"]]
