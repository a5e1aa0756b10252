"""NCCL's C interface, called through ctypes; RCCL has the same interface.

Why ctypes, and not NVIDIA's own package nccl4py: nccl4py (0.6.0, Apache-2.0) needs cuda-core, and cuda-bindings of PyTorch's
CUDA release, and does not support RCCL. This module uses some twenty functions, which have not changed since NCCL 2.18.
PyTorch's wheel depends on the wheel with libnccl.so.2, so there is nothing else to install. A comment above each function's
types has its C prototype.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from horovod.comm.base import DeviceFailure
from horovod.comm.reduction import ReduceOp

OLDEST = (2, 18, 1)
"""The oldest NCCL with all features that this module uses: non-blocking communicators, configured as :class:`NcclConfig`."""

SUCCESS = 0
IN_PROGRESS = 7
UNIQUE_ID_BYTES = 128

NO_COLOR = -1  # NCCL_SPLIT_NOCOLOR

_MAGIC = 0xCAFEBEEF
_UNDEFINED = -(2**31)
_HOST_IMMEDIATE = 1  # ncclScalarHostImmediate

# ncclDataType_t
DATA_TYPES: dict[np.dtype[Any], int] = {
    np.dtype(np.int8): 0,
    np.dtype(np.uint8): 1,
    np.dtype(np.int32): 2,
    np.dtype(np.uint32): 3,
    np.dtype(np.int64): 4,
    np.dtype(np.uint64): 5,
    np.dtype(np.float16): 6,
    np.dtype(np.float32): 7,
    np.dtype(np.float64): 8,
    np.dtype(ml_dtypes.bfloat16): 9,
}
BYTES = DATA_TYPES[np.dtype(np.uint8)]
"""The type for elements that are moved but not reduced."""

# ncclRedOp_t
OPERATIONS = {ReduceOp.SUM: 0, ReduceOp.PRODUCT: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3}
AVERAGE = 4


class NcclError(DeviceFailure):
    """A call of NCCL has failed."""


class UniqueId(ctypes.Structure):
    """``typedef struct { char internal[128]; } ncclUniqueId;``"""

    _fields_ = [("internal", ctypes.c_char * UNIQUE_ID_BYTES)]

    def data(self) -> bytes:
        return ctypes.string_at(ctypes.addressof(self), UNIQUE_ID_BYTES)


class NcclConfig(ctypes.Structure):
    """``ncclConfig_t`` of NCCL 2.18. Newer versions append fields; by the size they see that these are not set."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cgaClusterSize", ctypes.c_int),
        ("minCTAs", ctypes.c_int),
        ("maxCTAs", ctypes.c_int),
        ("netName", ctypes.c_char_p),
        ("splitShare", ctypes.c_int),
    ]

    @classmethod
    def non_blocking(cls) -> NcclConfig:
        """The configuration in which calls return before they are complete; the caller polls ``ncclCommGetAsyncError``."""
        unset = _UNDEFINED
        return cls(ctypes.sizeof(cls), _MAGIC, code_of(OLDEST), 0, unset, unset, unset, None, unset)


def code_of(version: tuple[int, int, int]) -> int:
    """The version code ``NCCL_VERSION(major, minor, patch)``, as NCCL 2.9 and newer define it."""
    major, minor, patch = version
    return major * 10000 + minor * 100 + patch


def text_of(code: int) -> str:
    """A version code as text, such as ``2.27.5``."""
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


_comm = ctypes.c_void_p
_stream = ctypes.c_void_p
_address = ctypes.c_void_p
_count = ctypes.c_size_t
_int = ctypes.c_int
_pointer = ctypes.POINTER

_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    # ncclResult_t ncclGetVersion(int *version)
    "ncclGetVersion": (_int, [_pointer(_int)]),
    # ncclResult_t ncclGetUniqueId(ncclUniqueId *uniqueId)
    "ncclGetUniqueId": (_int, [_pointer(UniqueId)]),
    # const char *ncclGetErrorString(ncclResult_t result)
    "ncclGetErrorString": (ctypes.c_char_p, [_int]),
    # const char *ncclGetLastError(ncclComm_t comm)
    "ncclGetLastError": (ctypes.c_char_p, [_comm]),
    # ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank, ncclConfig_t *config)
    "ncclCommInitRankConfig": (_int, [_pointer(_comm), _int, UniqueId, _int, _pointer(NcclConfig)]),
    # ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config)
    "ncclCommSplit": (_int, [_comm, _int, _int, _pointer(_comm), _pointer(NcclConfig)]),
    # ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *asyncError)
    "ncclCommGetAsyncError": (_int, [_comm, _pointer(_int)]),
    # ncclResult_t ncclCommFinalize(ncclComm_t comm)
    "ncclCommFinalize": (_int, [_comm]),
    # ncclResult_t ncclCommDestroy(ncclComm_t comm)
    "ncclCommDestroy": (_int, [_comm]),
    # ncclResult_t ncclCommAbort(ncclComm_t comm)
    "ncclCommAbort": (_int, [_comm]),
    # ncclResult_t ncclGroupStart(void), ncclGroupEnd(void)
    "ncclGroupStart": (_int, []),
    "ncclGroupEnd": (_int, []),
    # ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t datatype,
    #                                       ncclScalarResidence_t residence, ncclComm_t comm)
    "ncclRedOpCreatePreMulSum": (_int, [_pointer(_int), _address, _int, _int, _comm]),
    # ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm)
    "ncclRedOpDestroy": (_int, [_int, _comm]),
    # ncclResult_t ncclAllReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
    #                            ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
    "ncclAllReduce": (_int, [_address, _address, _count, _int, _int, _comm, _stream]),
    # ncclResult_t ncclReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op,
    #                         int root, ncclComm_t comm, cudaStream_t stream)
    "ncclReduce": (_int, [_address, _address, _count, _int, _int, _int, _comm, _stream]),
    # ncclResult_t ncclBroadcast(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
    #                            ncclComm_t comm, cudaStream_t stream)
    "ncclBroadcast": (_int, [_address, _address, _count, _int, _int, _comm, _stream]),
    # ncclResult_t ncclAllGather(const void *sendbuff, void *recvbuff, size_t sendcount, ncclDataType_t datatype,
    #                            ncclComm_t comm, cudaStream_t stream)
    "ncclAllGather": (_int, [_address, _address, _count, _int, _comm, _stream]),
    # ncclResult_t ncclReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount, ncclDataType_t datatype,
    #                                ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
    "ncclReduceScatter": (_int, [_address, _address, _count, _int, _int, _comm, _stream]),
    # ncclResult_t ncclSend(const void *sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
    #                       cudaStream_t stream)
    "ncclSend": (_int, [_address, _count, _int, _int, _comm, _stream]),
    # ncclResult_t ncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
    #                       cudaStream_t stream)
    "ncclRecv": (_int, [_address, _count, _int, _int, _comm, _stream]),
}


_KEEP_INTERPRETER_LOCK = frozenset(
    {
        "ncclCommGetAsyncError",
        "ncclGroupStart",
        "ncclAllReduce",
        "ncclReduce",
        "ncclBroadcast",
        "ncclAllGather",
        "ncclReduceScatter",
        "ncclSend",
        "ncclRecv",
    }
)
"""Calls that only queue or query, and never wait. They keep the interpreter lock: if another Python thread computes, releasing
the lock costs more than the call, since the other thread then keeps the lock for milliseconds."""


class Nccl:
    """One loaded library.

    Args:
        functions: an object with the C functions as attributes, their types set; or a stand-in.
        where: the library's file, for messages.
    """

    def __init__(self, functions: Any, where: str) -> None:
        self.functions = functions
        self.where = where

    @classmethod
    def load(cls, path: str) -> Nccl:
        """Load the library from a file, and check that it has all functions.

        Raises:
            OSError: the file cannot be loaded, or is too old; the message says which version is needed.
            NcclError: the library cannot report its version.
        """
        releasing, keeping = ctypes.CDLL(path), ctypes.PyDLL(path)
        functions = SimpleNamespace()
        for name, (result, arguments) in _PROTOTYPES.items():
            try:
                function = getattr(keeping if name in _KEEP_INTERPRETER_LOCK else releasing, name)
            except AttributeError:
                raise OSError(f"{path} has no {name}: it is older than NCCL {text_of(code_of(OLDEST))}") from None
            function.restype, function.argtypes = result, arguments
            setattr(functions, name, function)
        nccl = cls(functions, path)
        if nccl.version() < code_of(OLDEST):
            raise OSError(f"{path} is NCCL {text_of(nccl.version())}; {text_of(code_of(OLDEST))} or newer is needed")
        return nccl

    def version(self) -> int:
        """The version code of the library, for example 22705 for 2.27.5."""
        version = _int(0)
        self.check("ncclGetVersion", self.functions.ncclGetVersion(ctypes.byref(version)))
        return version.value

    def unique_id(self) -> bytes:
        """A new unique id, with which the ranks of one communicator find each other."""
        made = UniqueId()
        self.check("ncclGetUniqueId", self.functions.ncclGetUniqueId(ctypes.byref(made)))
        return made.data()

    def check(self, call: str, result: int) -> None:
        """Raise NcclError, with NCCL's message, unless ``result`` is success."""
        if result != SUCCESS:
            raise NcclError(f"{call}: {self.error_text(result)}")

    def error_text(self, result: int) -> str:
        """The text of a result code, with NCCL's last error.

        ``ncclGetLastError`` gets no communicator: NCCL ignores it, and another thread may have destroyed it.
        """
        text = (self.functions.ncclGetErrorString(result) or b"").decode(errors="replace")
        more = (self.functions.ncclGetLastError(None) or b"").decode(errors="replace").strip()
        return f"NCCL says {text!r} (code {result}){f': {more}' if more else ''}"

    def async_error(self, communicator: int) -> int:
        """The state of a communicator as a result code: success, in progress, or the first error since it was made.

        Raises:
            NcclError: NCCL cannot report the state.
        """
        state = _int(0)
        result = self.functions.ncclCommGetAsyncError(communicator, ctypes.byref(state))
        self.check("ncclCommGetAsyncError", result)
        return state.value


def scalar(value: float, dtype: np.dtype[Any]) -> ctypes.Array[ctypes.c_char]:
    """A factor as ``ncclRedOpCreatePreMulSum`` reads it: one element of ``dtype`` in host memory."""
    return ctypes.create_string_buffer(np.array([value]).astype(dtype).tobytes(), dtype.itemsize)


def residence() -> int:
    """The ``ncclScalarResidence_t`` of a :func:`scalar`: host memory, which NCCL reads before the call returns."""
    return _HOST_IMMEDIATE


_NAMES = ("libnccl.so.2", "librccl.so.1", "librccl.so")
_MAPPED = re.compile(r"(/.*/lib[nr]ccl\.so[^/ ]*)$", re.MULTILINE)


def _in_use() -> str:
    """The file that this process has loaded already, which PyTorch may do; "" for none. A second copy beside it would fail."""
    try:
        found = _MAPPED.search(Path("/proc/self/maps").read_text(errors="surrogateescape"))
    except OSError:
        return ""
    return "" if found is None else found[1]


def _folders() -> Iterator[Path]:
    """Where the library may be, best first: the wheels of NVIDIA and PyTorch, the environment (conda), LD_LIBRARY_PATH."""
    for package in ("nvidia.nccl", "torch"):
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            continue
        for location in (spec.submodule_search_locations or []) if spec is not None else []:
            yield Path(location, "lib")
    yield Path(sys.prefix, "lib")
    yield from (Path(each) for each in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if each)


def find() -> str:
    """The path of the library that :func:`loaded` would load; "" if there is none. Loads nothing."""
    present = (str(path) for folder in _folders() for name in _NAMES if (path := folder / name).exists())
    system = (found for name in ("nccl", "rccl") if (found := ctypes.util.find_library(name)))
    return _in_use() or next(present, "") or next(system, "")


_loaded: dict[str, Nccl] = {}


def loaded() -> Nccl:
    """The library, which the first call loads.

    Raises:
        OSError: there is no library, or it cannot be loaded; the message says what to do.
    """
    path = find()
    if not path:
        raise OSError(
            f"libnccl.so.2 was not found in {', '.join(map(str, _folders()))}, nor in the system's library folders: pip "
            "install nvidia-nccl-cu12 (or nvidia-nccl-cu13, to match PyTorch's CUDA), or install the system's package "
            "libnccl2, or set LD_LIBRARY_PATH to its folder; for ROCm, librccl.so comes with PyTorch"
        )
    if path not in _loaded:
        _loaded[path] = Nccl.load(path)
    return _loaded[path]
