"""What programs in ``benchmarks`` compare has the same settings, and what they say of the machine is so."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from horovod.runner import worker_environment

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of the folder; other tests do not see it."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


def test_all_arrangements_have_the_memory_settings_of_horovodrun(
    program: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    arrangements, processes = program("training_arrangements"), program("training_processes")
    for name in worker_environment.memory({}):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, env: started.append((command, env)))
    for name, framework in arrangements.FRAMEWORKS.items():
        for arrangement in [*arrangements.COMMON, *(each for peer in framework.peers.values() for each in peer)]:
            started.clear()
            processes.launch(name, arrangement, 2, "mlp", "/nowhere")
            under_horovodrun = "horovod.runner.launch" in started[0][0]
            assert under_horovodrun == (arrangement in arrangements.UNDER_HOROVODRUN)
            assert len(started) == (1 if under_horovodrun else 2)
            for _, env in started:
                settings = {each: env.get(each) for each in worker_environment.memory({})}
                # horovodrun gives them to its ranks by itself, unless some are there already
                assert settings == (dict.fromkeys(settings) if under_horovodrun else worker_environment.memory({})), (
                    arrangement
                )


def test_the_picture_has_one_bar_for_each_way_to_train_and_for_what_it_is_held_against(
    program: Callable[[str], ModuleType],
) -> None:
    arrangements, report = program("training_arrangements"), program("training_report")
    for added in (each for framework in arrangements.FRAMEWORKS.values() for each in framework.peers.values()):
        measured = [*arrangements.COMMON, *added]
        charted = [each for each in report.CHARTED if each in measured]
        assert set(measured) - set(charted) == {arrangements.ONE_RANK, arrangements.SIDE_BY_SIDE}
        assert 3 <= len(charted) <= 4 and charted[0] == arrangements.ALONE


def test_efficiency_is_against_one_process_of_the_same_framework(program: Callable[[str], ModuleType]) -> None:
    report = program("training_report")
    seconds = {"alone": [2.0, 1.0], "hvd": [1.25, 3.0], "alone, keras 2": [1.5, 1.4], "mwms": [2.8, 9.0]}
    assert report.Result("mlp", 10, 2, seconds).to_dict()["efficiency"] == {"hvd": 0.8, "mwms": 0.5}
    del seconds["alone, keras 2"]
    assert report.Result("mlp", 10, 2, seconds).to_dict()["efficiency"] == {"hvd": 0.8, "mwms": 1 / 2.8}


def test_goals_read_what_training_writes(program: Callable[[str], ModuleType]) -> None:
    goals, report = program("goals"), program("training_report")
    seconds = {
        "alone": [1.0],
        "hvd, 1 rank": [1.01],
        "side by side": [1.1],
        "hvd": [1.25],
        "ddp": [2.5],
        "ddp, views": [2.0],
    }
    figures = goals.of_training(report.Result("mlp", 1, 1, seconds).to_dict())
    found = {(figure.name, figure.beside.split(" (")[0]): figure for figure in figures}
    efficiency = "training efficiency, mlp"
    assert list(found) == [
        *((efficiency, beside) for beside in ("alone", "side by side", "ddp", "ddp, views")),
        ("one rank, mlp", "alone"),
    ]
    assert found[efficiency, "ddp"].value == "80.0%" and found[efficiency, "ddp"].ratio == pytest.approx(2.0)
    assert found[efficiency, "ddp, views"].ratio == pytest.approx(1.6)
    assert found["one rank, mlp", "alone"].value == "+1.00%" and not found["one rank, mlp", "alone"].met


@pytest.mark.parametrize(
    ("seconds", "found", "looks"),
    [
        ([0.3], 0.3, 1),
        ([60.0, 12.0, 0.5], 0.5, 3),
        ([3.0] * 9 + [2.0], 2.0, 10),
        ([90.0] * 9 + [40.0, 0.0], 40.0, 10),
    ],
)
def test_only_work_that_lasts_makes_a_machine_busy(
    seconds: list[float],
    found: float,
    looks: int,
    program: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = program("machine")
    looked: list[float] = []

    def look(interval: float) -> float:
        looked.append(interval)
        return seconds[len(looked) - 1]

    monkeypatch.setattr(machine.psutil, "cpu_percent", look)
    description: dict[str, Any] = machine.describe(())
    assert description["busy_percent"] == found and looked == [1.0] * looks
    assert ("BUSY" in machine.in_words(description)) == machine.is_busy(description) == (found > 5)
