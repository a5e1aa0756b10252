"""Sleeping on a word of shared memory until another process changes it: the Linux futex call, through ctypes.

Rejected alternatives: POSIX semaphores and process-shared mutexes need a libc layout in the arena and cannot be woken by an
abort; eventfd and sockets cost a descriptor per pair and twice the system calls.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import sys

_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_EVERYBODY = 2**31 - 1
_SYSCALL_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_NUMBER = _SYSCALL_NUMBERS.get(platform.machine(), -1)

available = sys.platform == "linux" and _NUMBER >= 0 and sys.byteorder == "little"
"""Whether this machine has futexes as this module calls them."""


class _TimeSpec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


# long syscall(long number, uint32_t *address, int operation, uint32_t value, const struct timespec *timeout)
_waiting = ctypes.CDLL(None, use_errno=True).syscall  # releases the interpreter lock while it sleeps
_waking = ctypes.PyDLL(None).syscall  # keeps the interpreter lock: the call returns at once
for _call in (_waiting, _waking):
    _call.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p]
    _call.restype = ctypes.c_long


def wait(address: int, value: int, seconds: float) -> None:
    """Sleep while the 32-bit word at ``address`` holds ``value``, at most ``seconds``; may return early."""
    whole = int(seconds)
    timeout = _TimeSpec(whole, int((seconds - whole) * 1e9))
    if _waiting(_NUMBER, address, _FUTEX_WAIT, value, ctypes.addressof(timeout)) == -1:
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise OSError(number, f"futex wait failed: {errno.errorcode.get(number, number)}")


def wake(address: int) -> None:
    """Wake everybody who sleeps on the word at ``address``."""
    _waking(_NUMBER, address, _FUTEX_WAKE, _EVERYBODY, None)


weakly_ordered = platform.machine() not in ("x86_64", "AMD64")
"""Whether other processors may see two stores of this one in another order, so that :func:`fence` is needed."""

_private_word = ctypes.c_uint32(0)


def fence() -> None:
    """A full memory barrier: the kernel executes one before it looks for sleepers."""
    _waking(_NUMBER, ctypes.addressof(_private_word), _FUTEX_WAKE, 1, None)
