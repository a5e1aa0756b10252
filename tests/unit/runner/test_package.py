"""The package's front door."""

from __future__ import annotations

import subprocess
import sys

import pytest

import horovod
from horovod import runner


def test_the_package_offers_run_and_its_version() -> None:
    assert horovod.run is runner.run
    assert horovod.__version__ == "0.28.1"  # clients compare it
    assert "run" in dir(horovod)
    with pytest.raises(AttributeError, match="no attribute 'init'"):
        horovod.init  # noqa: B018  the access is the test


def test_importing_it_imports_nothing_heavy() -> None:
    heavy = {"torch", "tensorflow", "numpy", "yaml", "rich", "psutil", "asyncio", "subprocess", "msgspec"}
    program = "import sys, horovod, horovod.runner; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", program], text=True).split()
    assert not heavy & set(loaded)


def test_the_launcher_imports_no_framework_and_no_parser_it_does_not_need() -> None:
    heavy = {"torch", "tensorflow", "numpy", "yaml", "rich", "psutil", "asyncio", "http", "cloudpickle"}
    program = "import sys, horovod.runner.launch, horovod.runner.job; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", program], text=True).split()
    assert not heavy & set(loaded)
