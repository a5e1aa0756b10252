"""What a rank tells the others about its GPUs, and the user where they cannot be used."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from horovod.comm.device import DeviceFacts
from horovod.comm.nccl import library
from horovod.core.engines.device_choice import own_report
from horovod.core.requests import devices


@pytest.fixture
def provided() -> Iterator[Any]:
    before = devices.provider()
    provider = SimpleNamespace(facts=lambda: DeviceFacts(("GPU-a",), ""))
    devices.provide(provider)  # type: ignore[arg-type]
    yield provider
    devices.provide(before)


def test_one_rank_of_a_host_with_gpus_is_warned_that_there_is_no_library(
    provided: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "find", str)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere/else")
    with caplog.at_level(logging.WARNING, "horovod.core"):
        assert "was not found in" in own_report(1, 2, "", warns=False).obstacles["nccl"]
        own_report(1, 2, "host", warns=True)
        assert caplog.messages == []
        own_report(0, 2, "", warns=True)
    (told,) = caplog.messages
    assert "travel through host memory: libnccl.so.2 was not found in" in told and "/somewhere/else" in told
    caplog.clear()
    provided.facts = DeviceFacts
    own_report(0, 2, "", warns=True)
    monkeypatch.setattr(library, "find", lambda: "libnccl.so.2")
    provided.facts = lambda: DeviceFacts(("GPU-a",), "")
    own_report(0, 2, "", warns=True)
    assert caplog.messages == []  # without a GPU there is nothing to warn of, nor with the library
