"""Reads another process's memory with Linux's cross-memory attach, through ctypes.

The kernel permits it to processes that may trace the other one: of the same user, in the same PID namespace. Containers may
filter the call, and the security module Yama may restrict it further (:func:`permit_siblings`), so it is tried first. Nothing
is ever written into another process.

One call moves a limited amount of data, so vectors are read by a :class:`CopyPlan`.
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
"""Whether the system has the call. Only a call shows whether it is permitted."""


def read(process: int, nbytes: int, iovecs: int, iovec_count: int, into: int, into_count: int) -> None:
    """Copy memory of another process into memory of this one.

    Args:
        process: its id.
        nbytes: how many bytes there are, on both sides; at most 1 GiB.
        iovecs, into: the addresses of arrays of ``iovec``, each an address and a number of bytes; at most
            :data:`~horovod.comm.spans.VECTORS` of them. ``iovecs`` lie in the other process, ``into`` in this one.

    Raises:
        ProcessLookupError: there is no such process any more.
        PermissionError: the kernel does not permit it.
        OSError: an address is not, or no longer, memory of its process; or the system has no such call.
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
    """Whether permitted processes can read these bytes of this process's memory.

    Memory that a device's driver has mapped, such as page-locked memory for a GPU, cannot be read.
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
    """Let the descendants of this process's parent read its memory, if Yama would let only its ancestors.

    The ranks of a host are usually children of one launcher, which starts nothing else.
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
        first: its first row in :meth:`CopyPlan.iovecs`; its runs are as many rows.
    """

    first: int
    runs: list[Run]
    length: int
    nbytes: int


class CopyPlan:
    """Splits elements ``[start, stop)`` of several vectors into copy steps of up to ``limit`` bytes; depends only on the
    layout.

    All ranks have vectors of the same lengths, at different addresses. So the steps are the same for all of them in every
    training step, and are computed once; only the addresses are added each time.

    Attributes:
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
        """The runs of all steps for vectors at these addresses: rows of an address and a number of bytes (``iovec``)."""
        rows: Array = self._rows.copy()
        rows[:, 0] += addresses[self._vectors]
        return rows


@lru_cache(maxsize=256)
def copy_plan(layout: Layout, start: int, stop: int, limit: int) -> CopyPlan:
    """Cached, because every training step has the same batches."""
    return CopyPlan(layout, start, stop, limit)
