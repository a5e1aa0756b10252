"""The largest result whose memory the C library keeps for the next one: 32 MiB, with all that a block has beside its bytes.

``horovodrun`` starts ranks with the highest limit that every glibc takes from the environment, 32 MiB, which counts a block's
header and its alignment to a huge page, too. A result of 32 MiB would be above it, and in new pages each time. glibc 2.35 and
newer take a higher limit; where one does not, the limit stays. A limit of the user's stays as well.
"""

from __future__ import annotations

import ctypes
import os

from horovod.core.config import MALLOC_MMAP_THRESHOLD, MALLOC_MMAP_THRESHOLD_BYTES

_M_MMAP_THRESHOLD = -3  # malloc.h
_BESIDE_THE_BYTES = 4 << 20
"""More than a header and the alignment to a huge page of 2 MiB."""


def keep_largest_results() -> bool:
    """Raise the limit that the launcher has set, if it has. Returns whether the C library has taken it."""
    if os.environ.get(MALLOC_MMAP_THRESHOLD) != str(MALLOC_MMAP_THRESHOLD_BYTES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False  # another C library
    return bool(mallopt(_M_MMAP_THRESHOLD, MALLOC_MMAP_THRESHOLD_BYTES + _BESIDE_THE_BYTES))
