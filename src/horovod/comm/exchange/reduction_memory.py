"""Memory for the reductions over a ``PeerExchange``, beside the caller's arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod.comm.datatypes import Array


def as_bytes(array: Array) -> memoryview:
    """The memory of a contiguous vector of any data type."""
    return array.view(np.uint8).data


class Staging:
    """Staging memory by use, slot and rank. It grows as needed, and all data types share it."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, int, int], Array] = {}

    def array(self, use: str, slot: int, rank: int, dtype: np.dtype[Any], length: int) -> Array:
        """A vector with arbitrary contents; the same ``use``, ``slot`` and ``rank`` get the same memory."""
        size = length * dtype.itemsize
        memory = self._memory.get((use, slot, rank))
        if memory is None or memory.size < size:
            memory = self._memory[use, slot, rank] = np.empty(size, np.uint8)
        return memory[:size].view(dtype)
