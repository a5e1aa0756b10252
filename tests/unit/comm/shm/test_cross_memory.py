"""Reading another process's memory where it lies."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod.comm.shm import cross_memory
from horovod.comm.spans import VECTORS, address_of

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="cross-memory attach needs Linux")

CHILD = "import ctypes; b = ctypes.create_string_buffer(b'abcdefgh'); print(ctypes.addressof(b), flush=True); input()"


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process, and where its memory holds ``abcdefgh``."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def read(process: int, ranges: list[tuple[int, int]], nbytes: int) -> bytes:
    rows = np.array(ranges, np.uintp)
    found = np.zeros(nbytes, np.uint8)
    into = np.array([[address_of(found), nbytes]], np.uintp)
    cross_memory.read(process, nbytes, address_of(rows), len(rows), address_of(into), 1)
    return found.tobytes()


def test_bytes_of_another_process(child: tuple[subprocess.Popen[str], int]) -> None:
    process, address = child
    assert read(process.pid, [(address, 8)], 8) == b"abcdefgh"
    assert read(process.pid, [(address + 6, 2), (address, 3)], 5) == b"ghabc"


def test_a_process_that_has_ended(child: tuple[subprocess.Popen[str], int]) -> None:
    process, address = child
    process.kill()
    process.wait()
    with pytest.raises(ProcessLookupError):
        read(process.pid, [(address, 8)], 8)


def test_invalid_addresses_are_an_error() -> None:
    with pytest.raises(OSError, match="Bad address"):
        read(os.getpid(), [(8, 8)], 8)
    array = np.zeros(8, np.uint8)
    with pytest.raises(OSError, match="only 8 of 16 bytes"):
        read(os.getpid(), [(address_of(array), 8), (8, 8)], 16)


def test_memory_that_others_cannot_read_is_noticed() -> None:
    ordinary = np.zeros(2 * VECTORS + 1, np.uint8)
    addresses = address_of(ordinary) + np.arange(ordinary.size, dtype=np.uintp)
    assert cross_memory.readable(addresses)
    assert cross_memory.readable(addresses[:0])
    unreadable = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_WRITE), np.uint8)
    addresses[-1] = address_of(unreadable)
    assert not cross_memory.readable(addresses)


class Library:
    """Stands in for the C library, and notes what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def prctl(self, option: int, value: Any, *_: int) -> None:
        self.asked.append((option, value.value))


@pytest.mark.parametrize(
    ("scope", "parent", "permitted"), [("1\n", 4711, [4711]), ("0\n", 4711, []), ("2\n", 4711, []), ("1\n", 1, [])]
)
def test_siblings_are_permitted_where_only_ancestors_would_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scope: str, parent: int, permitted: list[int]
) -> None:
    (tmp_path / "ptrace_scope").write_text(scope)
    library = Library()
    monkeypatch.setattr(cross_memory, "_YAMA", tmp_path / "ptrace_scope")
    monkeypatch.setattr(cross_memory, "_libc", library)
    monkeypatch.setattr(os, "getppid", lambda: parent)
    cross_memory.permit_siblings()
    assert library.asked == [(0x59616D61, pid) for pid in permitted]


def test_without_yama_no_permission_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = Library()
    monkeypatch.setattr(cross_memory, "_YAMA", tmp_path / "ptrace_scope")
    monkeypatch.setattr(cross_memory, "_libc", library)
    cross_memory.permit_siblings()
    assert library.asked == []
