"""NCCL's own host code under one rank, without a GPU: the library that ``nccl_host/build.py`` makes, and a device for it.

The control flow is NCCL's: its bootstrap, its checks, its threads, its states. Kernels do nothing, so no data moves, and what
is queued is over at once.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

from horovod.comm.device import DeviceRuntime
from horovod.comm.nccl.handle import CommHandle
from horovod.comm.nccl.library import Nccl
from time_limits import await_file

SIZE = 3
ENV = {
    "HOST_CODE_DEVICES": str(SIZE),
    "NCCL_P2P_DISABLE": "1",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_CUMEM_HOST_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_RAS_ENABLE": "0",
}
"""The environment of ranks: all that NCCL would need a GPU, InfiniBand or a network for is off."""

FLOAT, SUM = 7, 0
STREAM = 0x10
"""Any address: streams of :file:`cuda.c` are only passed on."""


class Device:
    """In place of a :class:`DeviceRuntime`: a device without streams of its own."""

    device = "a device without a GPU"

    def chosen(self) -> AbstractContextManager[None]:
        return nullcontext()


class Rank:
    """One rank on NCCL's host code.

    Attributes:
        nccl: the library.
        rank: of :data:`SIZE`.
    """

    def __init__(self, path: str, folder: str, device: int = -1) -> None:
        self.rank = int(os.environ["HOROVOD_RANK"])
        self.nccl = Nccl.load(path)
        self._own = ctypes.CDLL(path)
        self._own.host_code_launches.restype = ctypes.c_long
        self._own.host_code_device(self.rank if device < 0 else device)
        self._folder = Path(folder)
        self._memory = ctypes.create_string_buffer(1 << 16)

    def create(self, seconds: float = 30.0, limit: float = 20.0, name: str = "identity") -> CommHandle:
        """This rank's communicator of all."""
        return CommHandle.create(
            self.nccl,
            cast(DeviceRuntime, Device()),
            self.rank,
            SIZE,
            self._identity(name),
            time.monotonic() + seconds,
            limit,
        )

    @contextmanager
    def communicator(self) -> Iterator[CommHandle]:
        """A block with a communicator, which ends in good order."""
        made = self.create()
        yield made
        made.close()

    def launches(self) -> int:
        """How many kernels have been launched."""
        return int(self._own.host_code_launches())

    def allreduce(self, handle: CommHandle, times: int = 1, kind: int = FLOAT, operation: int = SUM) -> None:
        """So many in one group."""
        address = ctypes.addressof(self._memory)
        with handle.group():
            for _ in range(times):
                handle.call("ncclAllReduce", address, address, 1024, kind, operation, handle.address, STREAM)

    def every_operation(self, handle: CommHandle, size: int) -> None:
        """One of each in one group."""
        address = ctypes.addressof(self._memory)
        calls: list[tuple[Any, ...]] = [
            ("ncclAllReduce", address, address, 64, FLOAT, SUM),
            ("ncclReduce", address, address, 64, FLOAT, SUM, 0),
            ("ncclBroadcast", address, address, 64, FLOAT, size - 1),
            ("ncclAllGather", address, address, 64, FLOAT),
            ("ncclReduceScatter", address, address, 64, FLOAT, SUM),
            *(("ncclSend", address, 64, FLOAT, peer) for peer in range(size)),
            *(("ncclRecv", address, 64, FLOAT, peer) for peer in range(size)),
        ]
        with handle.group():
            for name, *arguments in calls:
                handle.call(name, *arguments, handle.address, STREAM)

    def meet(self, name: str) -> None:
        """Return when all ranks have called this."""
        (self._folder / f"{name}-{self.rank}").touch()
        for rank in range(SIZE):
            await_file(self._folder / f"{name}-{rank}")

    def _identity(self, name: str) -> bytes:
        path = self._folder / name
        if self.rank == 0:
            half = path.with_suffix(".half")
            half.write_bytes(self.nccl.unique_id())
            half.rename(path)
        await_file(path)
        return path.read_bytes()
