"""Reads another process's memory with Linux's cross-memory attach, through ctypes.

The kernel permits the read to processes that may trace the other one: of the same user, in the same PID namespace.
Containers may filter the call, and the security module Yama may restrict it further (:func:`permit_siblings`), so ranks try
it before they use it. No rank ever writes into another process.

One call moves a limited amount of data, so a :class:`CopyPlan` splits the vectors.
"""

from __future__ import annotations

import ctypes
import os
from bisect import bisect_right
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from horovod.comm.datatypes import Array
from horovod.comm.spans import VECTORS, Layout, address_of

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_DESCENDANTS_ONLY = "1"
_PR_SET_PTRACER = 0x59616D61

# ssize_t process_vm_readv(pid_t process, const struct iovec *into, unsigned long, const struct iovec *iovecs, unsigned long,
#                          unsigned long flags)
_libc = ctypes.CDLL(None, use_errno=True)
_read = getattr(_libc, "process_vm_readv", None)  # on Linux only
if _read is not None:
    _read.argtypes = [ctypes.c_int, *[ctypes.c_void_p, ctypes.c_ulong] * 2, ctypes.c_ulong]
    _read.restype = ctypes.c_ssize_t

available = _read is not None
"""Whether the system has the call. Whether the kernel permits it shows only when it is made."""


def read(process: int, nbytes: int, iovecs: int, iovec_count: int, into: int, into_count: int) -> None:
    """Copy memory of another process into memory of this one.

    Args:
        process: the id of the other process.
        nbytes: how many bytes to copy: the sum of either side; at most 1 GiB.
        iovecs, into: the addresses, in this process, of two arrays of ``iovec``: an address and a number of bytes each.
            ``iovecs`` describes memory of the other process, ``into`` memory of this one.
        iovec_count, into_count: the lengths of these arrays; at most :data:`~horovod.comm.spans.VECTORS`.

    Raises:
        ProcessLookupError: the other process has ended.
        PermissionError: the kernel does not permit the read.
        OSError: an address is not, or no longer, memory of its process; or the system lacks the call.
    """
    if _read is None:
        raise OSError("this system cannot read another process's memory")
    moved = _read(process, into, into_count, iovecs, iovec_count, 0)
    if moved < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if moved != nbytes:
        raise OSError(f"only {moved} of {nbytes} bytes could be read")


def readable(addresses: Array) -> bool:
    """Whether permitted processes can read the bytes at these addresses of this process.

    They cannot read memory that a device's driver has mapped, such as page-locked memory for a GPU.
    """
    for first in range(0, len(addresses), VECTORS):
        iovecs = np.ones((len(addresses[first : first + VECTORS]), 2), np.uintp)
        iovecs[:, 0] = addresses[first : first + VECTORS]
        found = np.empty(len(iovecs), np.uint8)
        into = np.array([[address_of(found), found.nbytes]], np.uintp)
        try:
            read(os.getpid(), found.nbytes, address_of(iovecs), len(iovecs), address_of(into), 1)
        except OSError:
            return False
    return True


def permit_siblings() -> None:
    """Let the descendants of this process's parent read this process's memory, if Yama permits only its ancestors.

    The ranks of a host are usually children of one launcher, which starts no other processes.
    """
    try:
        scope = _YAMA.read_text().strip()
    except OSError:
        return  # no Yama
    parent = os.getppid()
    if scope == _DESCENDANTS_ONLY and parent > 1:
        _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(parent), 0, 0, 0)


class Run(NamedTuple):
    """Elements ``[begin, end)`` of one vector."""

    vector: int
    begin: int
    end: int


class Step(NamedTuple):
    """The data of one system call, within the call's limits.

    Attributes:
        first: the first row of this step in :meth:`CopyPlan.iovecs`; each run is one row.
        runs: the parts of vectors to copy.
        length, nbytes: the elements and bytes of all runs.
    """

    first: int
    runs: list[Run]
    length: int
    nbytes: int


class CopyPlan:
    """Splits elements ``[start, stop)`` of several vectors into copy steps of up to ``limit`` bytes; depends only on the
    layout.

    All ranks have vectors of the same lengths, at different addresses. So the copy steps are the same on all ranks and in every
    training step, and are computed once; only the addresses are added each time.

    Args:
        layout: of the vectors.
        start, stop: the range of elements in their concatenation.
        limit: bytes of one copy step, at least one element.

    Attributes:
        steps: the copy steps, in order.
        longest: elements of the longest step.
    """

    def __init__(self, layout: Layout, start: int, stop: int, limit: int) -> None:
        self.steps: list[Step] = []
        runs: list[Run] = []
        itemsize = layout.dtype.itemsize
        most = max(limit // itemsize, 1)
        first, room = 0, most
        index = bisect_right(layout.ends, start)
        while start < stop:
            origin = layout.ends[index] - layout.sizes[index]
            end = min(layout.ends[index], stop, start + room)
            if end > start:
                runs.append(Run(index, start - origin, end - origin))
            room -= end - start
            start = end
            if start == layout.ends[index]:
                index += 1
            if start == stop or room == 0 or len(runs) - first == VECTORS:
                self.steps.append(Step(first, runs[first:], most - room, (most - room) * itemsize))
                first, room = len(runs), most
        self.longest = max([step.length for step in self.steps], default=0)
        self._vectors = np.array([run.vector for run in runs], np.intp)
        self._rows = np.empty((len(runs), 2), np.uintp)
        self._rows[:, 0] = np.array([run.begin for run in runs], np.uintp) * np.uintp(itemsize)
        self._rows[:, 1] = np.array([run.end - run.begin for run in runs], np.uintp) * np.uintp(itemsize)

    def iovecs(self, addresses: Array) -> Array:
        """The runs of all steps, for vectors at these addresses: an array of shape [runs, 2], each row an address and a number
        of bytes (``iovec``)."""
        rows: Array = self._rows.copy()
        rows[:, 0] += addresses[self._vectors]
        return rows


@lru_cache(maxsize=256)
def copy_plan(layout: Layout, start: int, stop: int, limit: int) -> CopyPlan:
    """A cached :class:`CopyPlan`, because every training step has the same batches."""
    return CopyPlan(layout, start, stop, limit)
