"""What the launcher checks before it starts anything."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator

import pytest

from horovod.runner.checks import check_autotuning
from horovod.runner.errors import UsageError


@pytest.fixture
def without_optuna(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "optuna" else find(name, *more)
    )
    yield


@pytest.mark.usefixtures("without_optuna")
def test_autotuning_without_its_package_is_refused_before_ranks_start() -> None:
    with pytest.raises(UsageError, match=r"--autotune: it needs the package optuna.*pip install 'horovod\[autotune\]'"):
        check_autotuning(sys.executable, os.environ)


@pytest.mark.usefixtures("without_optuna")
def test_programs_of_another_environment_check_that_themselves() -> None:
    check_autotuning("/bin/sh", os.environ)


def test_autotuning_with_its_package_is_accepted() -> None:
    pytest.importorskip("optuna")
    check_autotuning(sys.executable, os.environ)
