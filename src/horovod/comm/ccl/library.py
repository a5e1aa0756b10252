"""The functions of oneCCL's C interface that Horovod uses, called through ctypes; a comment above each has its prototype.

They only move bytes: Horovod reduces itself. All calls block until the collective is over.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from pathlib import Path
from typing import Any

UNIQUE_ID_BYTES = 4096
_UINT8 = 1  # onecclUint8 of onecclDataType_t

NAME = "libccl.so.2"
COMPANIONS = ("libfabric.so.1", "libccl_legacy_cpu.so")
"""The libraries that libccl loads by name alone. They must be loaded beforehand if they are not on the loader's path."""

_MISSING = re.compile(r"(lib[\w.+-]+): cannot open shared object file")


def _load(folder: Path, name: str) -> ctypes.CDLL:
    """Load a library of a folder, after the libraries of the same folder that it needs and that the loader does not find."""
    loaded = {name}
    while True:
        try:
            return ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            missing = _MISSING.match(str(error))
            if missing is None or missing[1] in loaded or not (folder / missing[1]).exists():
                raise
            loaded.add(missing[1])
            _load(folder, missing[1])


class _UniqueId(ctypes.Structure):
    _fields_ = [("data", ctypes.c_char * UNIQUE_ID_BYTES)]


class OneCclError(RuntimeError):
    """A function of oneCCL has failed."""


def path() -> Path | None:
    """The library's path: in ``$CCL_ROOT/lib``, or where the wheel ``oneccl`` installs it; None if it is in neither folder."""
    roots = [os.environ.get("CCL_ROOT", ""), sys.prefix]
    return next((found for root in roots if root and (found := Path(root) / "lib" / NAME).exists()), None)


class Library:
    """The loaded library.

    Raises:
        OneCclError: the library is not installed.
        OSError, AttributeError: it cannot be loaded, or lacks a function.
    """

    def __init__(self) -> None:
        found = path()
        if found is None:
            raise OneCclError(f"there is no {NAME}")
        os.environ.setdefault("CCL_PLUGIN", "ONECCL_LEGACY_CPU")
        self._library = library = _load(found.parent, NAME)
        for name in COMPANIONS:
            if (found.parent / name).exists():
                _load(found.parent, name)
        memory, count, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        # onecclResult_t onecclGetUniqueId(onecclUniqueId* id)
        library.onecclGetUniqueId.argtypes = [ctypes.POINTER(_UniqueId)]
        # onecclResult_t onecclCommInitRank(onecclComm_t* comm, int nranks, onecclUniqueId id, int rank)
        library.onecclCommInitRank.argtypes = [ctypes.POINTER(memory), number, _UniqueId, number]
        # onecclResult_t onecclAllGather(void* send, void* receive, size_t count, onecclDataType_t, onecclComm_t, void* stream)
        library.onecclAllGather.argtypes = [memory, memory, count, number, memory, memory]
        # onecclResult_t onecclAllToAll(void* send, void* receive, size_t count, onecclDataType_t, onecclComm_t, void* stream)
        library.onecclAllToAll.argtypes = [memory, memory, count, number, memory, memory]
        # onecclResult_t onecclBroadcast(void* send, void* receive, size_t count, onecclDataType_t, int root, onecclComm_t,
        #                                void* stream)
        library.onecclBroadcast.argtypes = [memory, memory, count, number, number, memory, memory]
        # onecclResult_t onecclCommDestroy(onecclComm_t comm)
        library.onecclCommDestroy.argtypes = [memory]
        # const char* onecclGetErrorString(onecclResult_t result)
        library.onecclGetErrorString.argtypes = [number]
        library.onecclGetErrorString.restype = ctypes.c_char_p

    def _check(self, status: int) -> None:
        if status:
            text = self._library.onecclGetErrorString(status) or b""
            raise OneCclError(f"oneCCL: {text.decode(errors='replace')} ({status})")

    def unique_id(self) -> bytes:
        """A new unique id, which all ranks of one communicator need."""
        made = _UniqueId()
        self._check(self._library.onecclGetUniqueId(ctypes.byref(made)))
        return bytes(made)

    def communicator(self, size: int, unique_id: bytes, rank: int) -> Any:
        """A new communicator. All ranks must call this; it blocks until they have."""
        made = ctypes.c_void_p()
        identity = _UniqueId.from_buffer_copy(unique_id)
        self._check(self._library.onecclCommInitRank(ctypes.byref(made), size, identity, rank))
        return made

    def allgather(self, communicator: Any, source: int, target: int, count: int) -> None:
        """Gather ``count`` bytes of each rank: from address ``source`` to address ``target``, in rank order."""
        self._check(self._library.onecclAllGather(source, target, count, _UINT8, communicator, None))

    def alltoall(self, communicator: Any, source: int, target: int, count: int) -> None:
        """Send ``count`` bytes from each rank to each: from address ``source`` to address ``target``, both in rank order."""
        self._check(self._library.onecclAllToAll(source, target, count, _UINT8, communicator, None))

    def broadcast(self, communicator: Any, data: int, count: int, root: int) -> None:
        """Send ``count`` bytes of rank ``root`` to all others, from address ``data`` to the address ``data`` of each."""
        self._check(self._library.onecclBroadcast(data, data, count, _UINT8, root, communicator, None))

    def destroy(self, communicator: Any) -> None:
        self._check(self._library.onecclCommDestroy(communicator))
