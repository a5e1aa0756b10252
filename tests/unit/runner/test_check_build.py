"""``horovodrun --check-build`` tries what it says: frameworks, engines and launchers that stand in for real ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import horovod
from horovod.runner import check_build, probes
from horovod.runner.probes import ProbeResult


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Makes a module that probes can import."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda name, text: (tmp_path / f"{name}.py").write_text(text) and None


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Makes a program, the only ones on the PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(name: str, text: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    return make


def test_a_framework_that_can_be_imported(module: Callable[[str, str], None]) -> None:
    module("somenet", "__version__ = '7.1'")
    assert probes.framework("somenet", "", "pip install somenet") == ProbeResult(True, "7.1")


def test_a_framework_that_is_installed_and_broken_is_not_usable(module: Callable[[str, str], None]) -> None:
    module("brokennet", "raise ImportError('libcudart.so.12: cannot open shared object file')")
    found = probes.framework("brokennet", "", "pip install brokennet")
    assert not found.usable
    assert "libcudart.so.12: cannot open shared object file" in found.detail


@pytest.mark.parametrize(
    ("missing", "remedy"),
    [
        ("tensorflow", "pip install 'tensorflow'"),
        ("jax.numpy", "pip install 'jax[cpu]'"),
        ("emptynet.layers", "pip install emptynet --force-reinstall"),
        ("absl", "pip install emptynet --force-reinstall"),
    ],
)
def test_advice_installs_what_the_import_misses(module: Callable[[str, str], None], missing: str, remedy: str) -> None:
    module("emptynet", f"raise ModuleNotFoundError(\"No module named '{missing}'\")")
    assert probes.framework("emptynet", "", "pip install emptynet").remedy == remedy


def test_a_framework_whose_import_takes_long_is_not_waited_for(
    module: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "SECONDS", 0.5)
    module("slownet", "import time; time.sleep(600)")
    assert "importing it takes more than 0.5 s here" in probes.framework("slownet", "", "").detail


def test_a_framework_that_is_not_there_comes_with_the_command_that_adds_it() -> None:
    assert probes.framework("no_such_net", "", "pip install it") == ProbeResult(
        False, "not installed", "pip install it"
    )


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("echo 'mpirun (Open MPI) 5.0.11'; echo; echo 'Report bugs to'", "Open MPI 5.0.11"),
        ("echo 'HYDRA build details:'; echo '    Version:                                 5.0.2'", "MPICH 5.0.2"),
        ("echo slurm 22.05.8", "slurm 22.05.8"),
        ("echo OpenSSH_9.2p1 >&2", "OpenSSH_9.2p1"),
    ],
)
def test_launchers_say_what_they_are(tool: Callable[[str, str], None], text: str, version: str) -> None:
    tool("launch", text)
    assert probes.program("launch", ["--version"], "") == ProbeResult(True, version)


def test_a_launcher_that_fails_or_is_not_there(tool: Callable[[str, str], None]) -> None:
    tool("launch", "echo no cluster >&2; exit 1")
    assert probes.program("launch", ["--version"], "") == ProbeResult(False, "it fails: no cluster")
    assert probes.program("other", ["--version"], "get it") == ProbeResult(False, "not found on the PATH", "get it")


def test_engines_are_tried_with_a_job_that_has_time_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "SECONDS", 0.01)
    assert probes.engine("tcp").usable
    broken = probes.engine("no-such-engine")
    assert not broken.usable and "there is no such engine" in broken.detail


ENGINES = ("Shared memory (built in)", "TCP (built in)")
PROGRAMS = ("ssh", "mpirun", "srun", "jsrun", "torchrun", "kubectl")
FINDINGS = {
    **dict.fromkeys(("TensorFlow", "PyTorch", "Keras", *ENGINES, *PROGRAMS), ProbeResult(True, "1.0")),
    "MXNet": ProbeResult(False, "not installed", "pip install mxnet"),
}


def test_the_first_lines_are_those_that_tools_know() -> None:
    text = check_build.render(FINDINGS)
    assert text.startswith(
        f"Horovod v{horovod.__version__}:\n\nAvailable Frameworks:\n    [X] TensorFlow\n    [X] PyTorch\n    [ ] MXNet\n\n"
        "Available Controllers:\n    [ ] MPI\n    [X] Gloo\n\nAvailable Tensor Operations:\n    [ ] NCCL\n    [ ] DDL\n"
        "    [ ] CCL\n    [ ] MPI\n    [ ] Gloo\n"
    )
    assert f"\n\nDetails:\n  Horovod: {horovod.build_info()['version']}, in " in text
    assert "  MXNet: not installed. To add it: pip install mxnet\n" in text
    assert "  tensors in CPU memory travel by: shm, tcp\n" in text


def test_where_no_engine_works_nothing_is_said_to_work() -> None:
    text = check_build.render(
        {**FINDINGS, **dict.fromkeys(ENGINES, ProbeResult(False, "a job of two ranks failed: x"))}
    )
    assert "[ ] Gloo" in text.split("Operations")[0] and "[ ] horovodrun" in text
    assert "  Shared memory (built in): a job of two ranks failed: x\n" in text
