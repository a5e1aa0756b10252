"""The memory that ranks of a host share: what the kernel copies out of it and into it."""

from __future__ import annotations

import numpy as np
import pytest

from horovod.comm.shm.arena import Arena
from horovod.comm.spans import Layout, Spans
from unit.comm.test_spans import spans, vectors

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="shared memory needs Linux")


def test_bytes_are_scattered_over_more_arrays_than_one_system_call_takes() -> None:
    arena = Arena.create(2, 1 << 16)
    try:
        begin = Arena.header_bytes(2)
        sizes = np.random.default_rng(1).integers(0, 9, 5000)
        values = np.arange(sizes.sum(), dtype=np.int16)
        arena.bytes[begin : begin + values.nbytes] = values.view(np.uint8)
        targets = [np.zeros(size, np.int16) for size in sizes]
        arena.scatter_over(begin, begin + values.nbytes, targets)
        assert np.array_equal(np.concatenate(targets), values)
        with pytest.raises(OSError, match="short of 2 bytes"):
            arena.scatter_over(arena.length - 2, arena.length + 2, [np.zeros(2, np.int16)])
    finally:
        arena.close()


def test_the_kernel_gathers_and_scatters_more_places_than_one_call_takes() -> None:
    arena = Arena.create(2, 1 << 16)
    try:
        begin = Arena.header_bytes(2)
        lengths = np.random.default_rng(1).integers(0, 9, 5000).tolist()
        sources = vectors(lengths)
        targets = [np.zeros_like(source) for source in sources]
        total = sum(lengths)
        arena.gather(begin, begin + 2 * total, spans(sources).iovecs(0, total))
        assert np.array_equal(arena.bytes[begin : begin + 2 * total].view(np.int16), np.arange(total))
        arena.scatter(begin, begin + 2 * total, spans(targets).iovecs(0, total))
        assert all(map(np.array_equal, sources, targets))
        arena.scatter(begin, begin, spans(targets).iovecs(0, 0))
    finally:
        arena.close()


def test_what_the_kernel_cannot_copy_is_an_error() -> None:
    arena = Arena.create(2, 4096)
    try:
        array = np.zeros(4, np.int16)
        with pytest.raises(OSError, match="short of 2 bytes"):
            arena.scatter(arena.length - 6, arena.length + 2, spans([array]).iovecs(0, 4))
        nowhere = Spans(Layout.of(array.dtype, [4]), [8])
        with pytest.raises(OSError, match=r"shared memory: Bad address\. Was a tensor resized"):
            arena.gather(Arena.header_bytes(2), Arena.header_bytes(2) + 8, nowhere.iovecs(0, 4))
    finally:
        arena.close()
