"""The wheel that ``make wheel`` builds: its metadata, and whether it runs in an environment that has only what it asks for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from email.message import Message
from email.parser import BytesParser
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from time_limits import SOON

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "https://git.example.org/horovod"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="hatchling builds the wheel; it comes with the extra 'wheel'")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), REPOSITORY_URL=f"{ADDRESS}.git")
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def described(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return BytesParser().parsebytes(archive.read(name))


def run(*command: str, folder: Path = ROOT, **extra: str) -> str:
    environment = {name: value for name, value in os.environ.items() if "HOROVOD" not in name and name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, env=environment | extra, capture_output=True, text=True, timeout=SOON, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_serves_every_python_and_passes_the_checks_of_an_index(wheel: Path) -> None:
    pytest.importorskip("twine", reason="twine checks the wheel; it comes with the extra 'wheel'")
    assert wheel.name.endswith("-py3-none-any.whl")
    run(sys.executable, "-m", "twine", "check", "--strict", str(wheel))


def test_links_of_its_description_lead_to_files_of_the_repository(described: Message) -> None:
    text = str(described.get_payload())
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) > 10
    for link in links:
        assert re.match(r"https?://", link), link
        if link.startswith(ADDRESS):
            path = re.sub(r"#.*", "", link.removeprefix(ADDRESS)).split("/HEAD/")[1]
            assert (ROOT / path).exists(), link
    urls = dict(each.split(", ") for each in described.get_all("Project-URL", []))
    assert urls["Homepage"] == ADDRESS


def test_extras_of_the_interface_are_there(described: Message) -> None:
    extras = set(described.get_all("Provides-Extra", []))
    assert extras >= {
        "torch", "pytorch", "tensorflow", "tensorflow-cpu", "tensorflow-gpu", "keras", "mxnet", "all-frameworks", "mpi",
        "nccl", "oneccl", "autotune", "dev", "test",
    }  # fmt: skip
    keras = [Requirement(each) for each in described.get_all("Requires-Dist", []) if "extra == 'keras'" in each]
    assert {each.name for each in keras} == {"keras", "tensorflow"}, "an extra brings a back end"


def test_every_python_that_it_names_is_one_that_it_serves(described: Message) -> None:
    classifiers = re.findall(r":: (3\.\d+)\b", "\n".join(described.get_all("Classifier", [])))
    assert classifiers == ["3.10", "3.11", "3.12", "3.13", "3.14"]
    assert described["Requires-Python"] == ">=3.10"


def test_it_runs_where_nothing_is_installed_but_what_it_asks_for(wheel: Path, tmp_path: Path) -> None:
    """Distributions of this environment stand in for those that pip would download."""
    venv.create(tmp_path / "empty", symlinks=True)
    python = tmp_path / "empty" / "bin" / "python"
    (packages,) = (tmp_path / "empty" / "lib").glob("python*/site-packages")
    for name in needed(metadata_of(wheel)):
        link(name, packages)
    target = ["--python", str(python), "install", "--no-index", "--quiet", str(wheel)]
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", *target, folder=tmp_path)
    run(sys.executable, "-m", "pip", "--python", str(python), "check", folder=tmp_path)
    horovodrun = str(python.with_name("horovodrun"))
    assert "--num-proc" in run(horovodrun, "--help", folder=tmp_path)
    program = "import runpy, horovod; runpy.run_module('horovod._bindings.trial', run_name='__main__'); print(horovod.__file__)"
    told = run(horovodrun, "-np", "2", str(python), "-c", program, folder=tmp_path)
    path = packages / "horovod" / "__init__.py"
    assert sorted(told.splitlines()) == [f"[0]<stdout>:{path}", f"[1]<stdout>:{path}"]


def metadata_of(wheel: Path) -> list[str]:
    with ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return BytesParser().parsebytes(archive.read(name)).get_all("Requires-Dist", [])


def needed(requirements: list[str]) -> set[str]:
    """The names of the distributions that these requirements lead to, without extras."""
    found: set[str] = set()
    left = requirements
    while left:
        wanted = [Requirement(each) for each in left]
        names = {each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})} - found
        found |= names
        left = [each for name in names for each in metadata.requires(name) or []]
    return found


def link(name: str, packages: Path) -> None:
    """Make a distribution of this environment one of another, too."""
    distribution = metadata.distribution(name)
    for top in {path.parts[0] for path in distribution.files or []} - {"..", "__pycache__"}:
        (packages / top).symlink_to(Path(str(distribution.locate_file(top))))
