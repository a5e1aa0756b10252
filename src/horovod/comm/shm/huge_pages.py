"""Asks the kernel for huge pages for memory that is about to be written for the first time.

Each 4 KiB page of new memory costs a page fault when it is first written, up to several microseconds on a virtual machine: more
than receiving its contents. A page of 2 MiB costs a single fault. The call is advice: if the kernel's setting is "never", or
the system lacks the call, nothing happens.
"""

from __future__ import annotations

import ctypes
import mmap

LEAST_BYTES = 4 << 20
"""Smallest memory for which huge pages are requested. Smaller memory is more often reused than new. NumPy uses the same limit
for its arrays."""

_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)
_madvise = getattr(ctypes.CDLL(None), "madvise", None)
if _madvise is not None:
    _madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def prefer_huge(address: int, size: int) -> None:
    """Ask the kernel to back the ``size`` bytes at ``address`` with huge pages when they are first touched.

    Pages that the range covers only in part are left alone; so are ranges below :data:`LEAST_BYTES`."""
    if size < LEAST_BYTES or _ADVICE is None or _madvise is None:
        return
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    _madvise(begin, end - begin, _ADVICE)
