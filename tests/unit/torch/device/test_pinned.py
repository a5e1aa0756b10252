"""The pool of page-locked buffers: sizes, reuse, what a device still reads, and how much is kept."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from horovod.torch.device.pinned import SMALLEST, PinnedPool


class Point:
    """An event."""

    def __init__(self) -> None:
        self.reached = False

    def query(self) -> bool:
        return self.reached


def ordinary(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


@pytest.mark.parametrize("size", [1, SMALLEST - 1, SMALLEST, SMALLEST + 1, 100_000, 1 << 20, (1 << 20) + 1])
def test_sizes_are_powers_of_two(size: int) -> None:
    buffer = PinnedPool(ordinary).take(size)
    assert buffer.size >= max(size, SMALLEST) and buffer.size & (buffer.size - 1) == 0
    assert buffer.size < 2 * max(size, SMALLEST)
    assert buffer.memory.dtype == torch.uint8 and buffer.memory.shape == (buffer.size,)


def test_a_buffer_that_came_back_is_used_again() -> None:
    pool = PinnedPool(ordinary)
    first, other = pool.take(5000), pool.take(5000)
    assert first is not other and pool.bytes_in_use() == 2 * 8192
    pool.give(first)
    assert pool.bytes_in_use() == 8192
    assert pool.take(4097) is first
    assert pool.take(4096) is not first


def test_not_before_the_device_has_done_with_it() -> None:
    pool, point = PinnedPool(ordinary), Point()
    buffer = pool.take(1)
    pool.give(buffer, point)
    assert pool.take(1) is not buffer
    point.reached = True
    assert pool.take(1) is buffer


def test_a_buffer_that_is_never_returned_is_forgotten() -> None:
    pool = PinnedPool(ordinary)
    buffer = pool.take(1)
    memory = weakref.ref(buffer.memory)
    assert pool.bytes_in_use() == SMALLEST
    del buffer
    gc.collect()
    assert memory() is None and pool.bytes_in_use() == 0


class Counted:
    """Makes ordinary memory, and notes the sizes that it was asked for."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, size: int) -> torch.Tensor:
        self.sizes.append(size)
        return ordinary(size)


def test_the_least_recently_used_buffer_is_freed_first() -> None:
    made = Counted()
    pool = PinnedPool(made, limit=4 * SMALLEST)
    for buffer in [pool.take(size * SMALLEST) for size in (1, 2, 1)]:
        pool.give(buffer)
    for buffer in [pool.take(size * SMALLEST) for size in (1, 2, 1)]:  # all are kept
        pool.give(buffer)
    assert len(made.sizes) == 3
    pool.give(pool.take(4 * SMALLEST))
    pool.give(pool.take(4 * SMALLEST))
    assert len(made.sizes) == 4
    pool.take(2 * SMALLEST)
    assert len(made.sizes) == 5  # the large one alone was left


def test_a_step_that_repeats_keeps_all_its_buffers_however_many() -> None:
    made = Counted()
    pool = PinnedPool(made, limit=SMALLEST)
    for _ in range(5):
        for buffer in [pool.take(SMALLEST) for _ in range(10)]:
            pool.give(buffer)
    assert len(made.sizes) == 10
    pool.clear()
    pool.take(SMALLEST)
    assert len(made.sizes) == 11


def test_a_buffer_made_in_inference_mode_serves_others() -> None:
    pool = PinnedPool(ordinary)
    with torch.inference_mode():
        buffer = pool.take(1)
    buffer.memory.add_(1)
    assert buffer.memory[0].item() == 1
