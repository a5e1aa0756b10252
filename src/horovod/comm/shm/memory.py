"""Memory that ranks of one host share.

It has no name: one rank makes it with ``memfd_create`` and passes the descriptor, so nothing is left behind however the ranks
end, and no limit of ``/dev/shm`` applies.
"""

from __future__ import annotations

import mmap
import os
import sys

import numpy as np

from horovod.comm.datatypes import Array
from horovod.comm.shm import words


def in_pages(length: int) -> int:
    """``length`` bytes rounded up to whole pages."""
    return -(-length // mmap.PAGESIZE) * mmap.PAGESIZE


def created(length: int) -> int:
    """A descriptor of new memory of so many bytes, all zero.

    Raises:
        OSError: the kernel refuses, or has no futexes this code can use.
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
    """A descriptor of one's own of memory whose descriptor was passed to this process.

    Raises:
        OSError, ValueError: it cannot be used here, or is not what was announced.
    """
    _check_futexes()
    if os.fstat(descriptor).st_size != length:
        raise ValueError("the memory has another size than was announced")
    return os.dup(descriptor)


def _check_futexes() -> None:
    if not words.available:
        raise OSError(f"shared memory: no futex on {sys.platform}")


class SharedMemory:
    """The mapped memory, as one rank sees it.

    Args:
        descriptor: of the memory; owned from now on, even if it cannot be mapped.

    Attributes:
        length: bytes in all.
        descriptor: -1 once it is closed.
        bytes, address: all of it, and where it begins.
        words: the same as 64-bit words.
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
        """Let go of the memory; it is freed when the last rank has. Any number of times."""
        if self.descriptor < 0:
            return
        os.close(self.descriptor)
        self.descriptor = -1
        self.words.release()
        del self.bytes
        try:
            self._map.close()
        except BufferError:
            pass  # somebody still looks at a part of it; the mapping goes with the last view
