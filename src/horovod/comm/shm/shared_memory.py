"""Memory that ranks of one host share.

It has no name: one rank creates it with ``memfd_create`` and passes the descriptor to the others. So nothing is left behind,
however the ranks end, and the size of ``/dev/shm`` is no limit.
"""

from __future__ import annotations

import mmap
import os
import platform
import sys

import numpy as np

from horovod.comm.datatypes import Array
from horovod.comm.shm import futex_words


def in_pages(length: int) -> int:
    """``length`` bytes rounded up to whole pages."""
    return -(-length // mmap.PAGESIZE) * mmap.PAGESIZE


def created(length: int) -> int:
    """A descriptor of ``length`` bytes of new memory, all zero.

    Raises:
        OSError: the kernel refuses, or has no futexes that this code can use.
    """
    _check_futexes()
    descriptor = os.memfd_create("horovod", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, length)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def duplicated(descriptor: int, length: int) -> int:
    """A duplicate of a descriptor of shared memory that was passed to this process.

    Raises:
        OSError: the descriptor is invalid, or this system has no futexes that this code can use.
        ValueError: the memory has not ``length`` bytes, so it is not the announced memory.
    """
    _check_futexes()
    if os.fstat(descriptor).st_size != length:
        raise ValueError("the memory does not have the size that was announced")
    return os.dup(descriptor)


def _check_futexes() -> None:
    if not futex_words.available:
        raise OSError(
            f"shared memory: Horovod cannot call futexes on {sys.platform} with a {platform.machine()} processor"
        )


class SharedMemory:
    """One rank's mapping of the memory.

    Args:
        descriptor: of the memory. This object owns it from now on, even if mapping fails.
        length: the bytes of the memory.

    Attributes:
        descriptor: -1 after :meth:`close`.
        bytes, address: the whole memory, and its address.
        words: the memory as 64-bit words.
    """

    def __init__(self, descriptor: int, length: int) -> None:
        self.descriptor = descriptor
        self.length = length
        try:
            self._map = mmap.mmap(descriptor, length)
            self._map.madvise(mmap.MADV_DONTFORK)  # a forked child must neither see nor keep this memory
        except BaseException:
            os.close(descriptor)
            raise
        self.bytes: Array = np.frombuffer(self._map, np.uint8)
        self.address = int(self.bytes.ctypes.data)
        self.words = memoryview(self._map).cast("Q")

    def close(self) -> None:
        """Release this rank's mapping; the kernel frees the memory when the last rank has released it. May be called again."""
        if self.descriptor < 0:
            return
        os.close(self.descriptor)
        self.descriptor = -1
        self.words.release()
        del self.bytes
        try:
            self._map.close()
        except BufferError:
            pass  # a view of it still exists; the mapping ends with the last view
