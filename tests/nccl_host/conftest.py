"""NCCL's own host code for the tests beside this file: built by ``make test-nccl-host``, or they are skipped."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from host_code import ENV
from ranks import RankPool


@pytest.fixture(scope="session")
def nccl() -> str:
    """The library's file."""
    folder = os.environ.get("NCCL_HOST_CODE", "")
    if not folder:
        pytest.skip("NCCL's own host code was not built: make test-nccl-host NCCL_SOURCE=... CUDA_HEADERS=...")
    return str(Path(folder, "libnccl.so.2"))


@pytest.fixture
def pool(ranks: Callable[..., RankPool]) -> RankPool:
    """Three ranks with a device each."""
    return ranks(3, ENV)


@pytest.fixture(autouse=True)
def no_shared_memory_is_left() -> Iterator[None]:
    before = set(Path("/dev/shm").glob("nccl-*"))
    yield
    left = set(Path("/dev/shm").glob("nccl-*")) - before
    assert not left, f"NCCL left {left}"
