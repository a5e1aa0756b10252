"""Futex words: 64-bit words of shared memory with which ranks wait for each other. One rank writes a word; others read it and
sleep until it changes.

The words are at the beginning of a shared memory. Every rank has a line of 128 bytes with 64-bit words. Each kind of memory
uses some of them::

    packed | reduced | progress                 see horovod.comm.shm.counters
    proposal | outcome | closed | given up      see horovod.comm.shm.proposals
    asleep                                      1 while this rank sleeps on another rank's word
    completed | asleep for calls                see horovod.comm.shm.completed_calls

A wake-up is a system call, which costs as much as the copies of a small collective, and usually no rank sleeps. So a rank that
writes a word wakes others only if some rank sleeps::

    writer                              sleeper
    word = value                        asleep = 1
    (a full fence)                      (a full fence: the kernel's, before it compares)
    wake, if any rank is asleep         sleep while the word has the value that was read

In every order of these steps, the writer sees the sleeper, or the kernel sees the new value. Only one thread of a rank waits
on these words at a time. On processors with weakly ordered memory the writer always makes the call, which is also its fence.

The system call is Linux's futex, through ctypes. Rejected alternatives: POSIX semaphores and process-shared mutexes need a libc
layout in the shared memory and cannot be woken by an abort; eventfd and sockets cost a descriptor per pair and twice the
system calls.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import sys
import threading

PACKED = 0
REDUCED = 1
PROGRESS = 2
PROPOSAL = 3
OUTCOME = 4
CLOSED = 5
GIVEN_UP = 6
ASLEEP = 7
COMPLETED = 8
ASLEEP_FOR_CALLS = 9

LINE_WORDS = 16
WORD_BYTES = 8
"""The size of a word."""

_FUTEX_BITS = 0xFFFFFFFF
LONGEST_SLEEP_SECONDS = 1.0
"""Longest futex sleep; longer waits re-check."""


_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_ALL_SLEEPERS = 2**31 - 1
_SYSCALL_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_NUMBER = _SYSCALL_NUMBERS.get(platform.machine(), -1)

available = sys.platform == "linux" and _NUMBER >= 0 and sys.byteorder == "little"
"""Whether this system has futexes that this module can call."""


class _TimeSpec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


# long syscall(long number, uint32_t *address, int operation, uint32_t value, const struct timespec *timeout)
_waiting = ctypes.CDLL(None, use_errno=True).syscall  # releases the interpreter lock while it sleeps
_waking = ctypes.PyDLL(None).syscall  # keeps the interpreter lock: the call returns at once
for _call in (_waiting, _waking):
    _call.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p]
    _call.restype = ctypes.c_long


def _wait(address: int, value: int, seconds: float) -> None:
    """Sleep while the 32-bit word at ``address`` holds ``value``, at most ``seconds``; may return early."""
    whole = int(seconds)
    timeout = _TimeSpec(whole, int((seconds - whole) * 1e9))
    if _waiting(_NUMBER, address, _FUTEX_WAIT, value, ctypes.addressof(timeout)) == -1:
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise OSError(number, f"futex wait failed: {errno.errorcode.get(number, number)}")


def _wake(address: int) -> None:
    """Wake all threads that sleep on the word at ``address``."""
    _waking(_NUMBER, address, _FUTEX_WAKE, _ALL_SLEEPERS, None)


weakly_ordered = platform.machine() not in ("x86_64", "AMD64")
"""Whether other cores may see two stores of this one in a different order, so that :func:`fence` is needed."""

_private_word = ctypes.c_uint32(0)


def fence() -> None:
    """A full memory barrier, by a futex call that wakes no thread: the kernel executes one before it looks for sleepers."""
    _waking(_NUMBER, ctypes.addressof(_private_word), _FUTEX_WAKE, 1, None)


def word_bytes(size: int) -> int:
    """The bytes of the words of ``size`` ranks."""
    return size * LINE_WORDS * WORD_BYTES


def word_index(rank: int, kind: int) -> int:
    """The index of a rank's word of this kind (:data:`PACKED` and so on)."""
    return rank * LINE_WORDS + kind


class FutexWords:
    """All ranks' futex words, as one rank uses them.

    Args:
        words: the shared memory, at ``address``, as 64-bit words.
        rank, size: this rank's index in the group, and the size of the group.
        asleep: the kind of the word that says that a rank sleeps. Threads that sleep at the same time have words of their own.

    Attributes:
        values: the words, indexed by :func:`word_index`.
    """

    def __init__(self, words: memoryview, address: int, rank: int, size: int, asleep: int = ASLEEP) -> None:
        self.values = words
        self._address = address
        self._asleep = word_index(rank, asleep)
        self._sleepers = [word_index(peer, asleep) for peer in range(size) if peer != rank]
        self._lock = threading.Lock()

    def publish(self, index: int, value: int) -> None:
        """Write a word of this rank, after all earlier writes and before all later reads, and wake ranks that sleep on it."""
        if weakly_ordered:
            fence()
            self.values[index] = value
            _wake(self._address + index * WORD_BYTES)
            return
        values, lock = self.values, self._lock
        values[index] = value
        lock.acquire()  # an atomic exchange, which on this architecture is a full fence
        lock.release()
        for sleeper in self._sleepers:
            if values[sleeper]:
                _wake(self._address + index * WORD_BYTES)
                return

    def overwrite(self, index: int, value: int) -> None:
        """Write a word of any rank, and wake all ranks that sleep on it. Any thread may call it."""
        self.values[index] = value
        _wake(self._address + index * WORD_BYTES)

    def sleep(self, index: int, seen: int, seconds: float) -> None:
        """Sleep until a word differs from ``seen``, for at most ``seconds``; may return early."""
        values = self.values
        values[self._asleep] = 1
        try:
            _wait(self._address + index * WORD_BYTES, seen & _FUTEX_BITS, min(seconds, LONGEST_SLEEP_SECONDS))
        finally:
            values[self._asleep] = 0

    def await_value(self, index: int, value: int, spins: int, seconds: float) -> bool:
        """Wait until a word has reached ``value``; return whether it has. Polls ``spins`` times, then sleeps once, for at most
        ``seconds``."""
        values = self.values
        for _ in range(spins):
            if values[index] >= value:
                return True
        if seconds:
            seen = values[index]
            if seen < value:
                self.sleep(index, seen, seconds)
        return values[index] >= value

    def read_fence(self) -> None:
        """An acquire fence: later reads see what was written before the word that this rank has read."""
        if weakly_ordered:
            fence()

    def release(self) -> None:
        """Drop the reference to the memory."""
        self.values = memoryview(b"")
