"""The end of a process in which a call of MPI has not returned."""

from __future__ import annotations

import ctypes
from functools import cache


@cache
def leave_libraries_alone() -> None:
    """End this process without the destructors of its libraries, with its status and all of its output.

    The thread inside the call goes on until the process has ended. It would use what the destructors of MPI free, and crash
    the process, whose status and error nobody would see then. No effect where the C library has no ``on_exit`` (glibc has).
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit") and hasattr(libc, "__cxa_atexit"):
        # They run in reverse order, before the destructors of the libraries that are loaded by now. on_exit(3) calls
        # _exit(status, argument), which ignores the argument; __cxa_atexit calls fflush(NULL), which means all streams.
        libc["on_exit"](libc["_exit"], None)
        libc["__cxa_atexit"](libc["fflush"], None, None)
