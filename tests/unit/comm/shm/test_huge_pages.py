"""Advice about pages: where it reaches, and that memory is as it was."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from horovod.comm.shm.huge_pages import LEAST_BYTES, prefer_huge

HUGE = 2 << 20


def advised(address: int) -> bool:
    """Whether the mapping that holds ``address`` is marked for huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            begin, end = (int(edge, 16) for edge in head.split("-"))
            inside = begin <= address < end
        elif inside and head == "VmFlags:":
            return "hg" in line.split()
    return False


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no transparent huge pages to mark"
)
def test_large_memory_is_advised_and_keeps_its_contents() -> None:
    with mmap.mmap(-1, 4 * LEAST_BYTES) as memory:
        array = np.frombuffer(memory, np.uint8)
        array[::4096] = 7
        prefer_huge(array.ctypes.data + 100, array.nbytes - 200)
        assert advised(array.ctypes.data + HUGE)
        assert not advised(array.ctypes.data)  # the page that begins before the memory is not its own
        assert (array[::4096] == 7).all()
        del array


def test_small_memory_is_left_alone() -> None:
    with mmap.mmap(-1, LEAST_BYTES) as memory:
        array = np.frombuffer(memory, np.uint8)
        prefer_huge(array.ctypes.data, LEAST_BYTES - 1)
        assert not advised(array.ctypes.data)
        del array


def test_memory_that_is_not_there_is_no_error() -> None:
    with mmap.mmap(-1, 4 * LEAST_BYTES) as memory:
        array = np.frombuffer(memory, np.uint8)
        address = array.ctypes.data
        del array
    prefer_huge(address, 4 * LEAST_BYTES)
