"""Where Gloo can serve, and what is said where PyTorch is too old for that."""

from __future__ import annotations

import pytest

from horovod.comm.engine import EngineGroup
from horovod.comm.gloo import engine
from horovod.comm.gloo.engine import GlooEngine

PAIR = EngineGroup(0, 2, ("a", "a"))


@pytest.mark.parametrize("version", ["2.3.0", "2.10.1+cpu", "3.0a0+git1234"])
def test_a_new_enough_pytorch_serves(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(engine, "version_of", lambda name: version)
    assert GlooEngine().installed() == f"torch {version}"
    assert GlooEngine().obstacle(PAIR) == ""


@pytest.mark.parametrize("version", ["2.1.0+cu121", "2.2.2", "1.13.1"])
def test_an_older_pytorch_is_not_shown_as_usable_and_the_error_says_which_to_install(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(engine, "version_of", lambda name: version)
    assert GlooEngine().installed() == ""
    assert GlooEngine().obstacle(PAIR) == (
        f"Gloo of PyTorch {version} cannot change its time limit later: install PyTorch 2.3 or newer"
    )
