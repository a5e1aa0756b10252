"""Shared memory on a system whose futexes cannot be called."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import pytest

from horovod.comm.shm import futex_words
from horovod.comm.shm.shared_memory import created, duplicated


def test_without_futexes_the_error_names_the_system_and_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futex_words, "available", False)
    monkeypatch.setattr(platform, "machine", lambda: "mips64")
    message = f"cannot call futexes on {sys.platform} with a mips64 processor"
    with pytest.raises(OSError, match=message):
        created(4096)
    with Path(os.devnull).open() as file, pytest.raises(OSError, match=message):
        duplicated(file.fileno(), 0)
