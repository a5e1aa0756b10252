"""A binding whose framework is missing says what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import horovod
from time_limits import SOON


@pytest.mark.parametrize(
    ("binding", "framework", "extra"),
    [
        ("horovod.torch", "torch", "torch"),
        ("horovod.tensorflow", "tensorflow", "tensorflow"),
        ("horovod.tensorflow.keras", "tensorflow", "tensorflow"),
        ("horovod.keras", "keras", "keras"),
        ("horovod.mxnet", "mxnet", "mxnet"),
    ],
)
def test_a_missing_framework_is_named_with_the_command_that_installs_it(
    binding: str, framework: str, extra: str
) -> None:
    hidden = (
        f"import sys; sys.modules[{framework!r}] = None; sys.path.insert(0, {str(Path(horovod.__file__).parents[1])!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{hidden}; import {binding}"], capture_output=True, text=True, timeout=SOON
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: horovod.{framework} needs ") and f"pip install '.[{extra}]'" in last
