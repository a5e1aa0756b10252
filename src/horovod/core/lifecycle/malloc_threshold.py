"""Raises glibc's limit for memory that it keeps for the next result, so that results of 32 MiB stay below it.

``horovodrun`` starts ranks with the highest limit that every glibc takes from the environment, 32 MiB, which counts a block's
header and its alignment to a huge page, too. A result of 32 MiB would be above it, and in new pages each time. glibc 2.35 and
newer accept a higher limit; older ones keep the limit. A limit that the user has set stays as well.
"""

from __future__ import annotations

import ctypes
import os

from horovod._base.config import MALLOC_MMAP_THRESHOLD, MALLOC_MMAP_THRESHOLD_BYTES

_M_MMAP_THRESHOLD = -3  # malloc.h
_BESIDE_THE_BYTES = 4 << 20
"""More than a header and the alignment to a huge page of 2 MiB."""


def keep_largest_results() -> bool:
    """Raise the limit if the launcher has set it. Returns whether the C library has accepted it."""
    if os.environ.get(MALLOC_MMAP_THRESHOLD) != str(MALLOC_MMAP_THRESHOLD_BYTES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False  # another C library
    return bool(mallopt(_M_MMAP_THRESHOLD, MALLOC_MMAP_THRESHOLD_BYTES + _BESIDE_THE_BYTES))
