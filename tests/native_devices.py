"""CUDA's driver library, NCCL and NVML as C libraries that stand in for them, called through the real ctypes.

The sources are in ``tests/stand_in``; :func:`build` compiles them with the machine's compiler into one library. Device memory
is the host's, a stream is a thread that does its work late, and NCCL's stand-in moves the memory between real processes.
:func:`loaded` makes a process find that library instead of the real ones; :class:`StandIn` says how it behaves and what rules
were broken. :class:`Arrays` are collectives on such memory without a framework.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from horovod._bindings.device_tensors import CudaDevices, OnDevice
from horovod.comm.cuda import library as cuda
from horovod.comm.cuda import nvml
from horovod.comm.datatypes import Array, data_type_of
from horovod.comm.nccl import library as nccl
from horovod.comm.reduction import ReduceOp
from horovod.comm.spans import Spans, Vectors, address_of, layout_of
from horovod.core.lifecycle.context import running
from horovod.core.lifecycle.process_set import membership
from horovod.core.requests.batch import shard_rows
from horovod.core.requests.handle import Handle
from horovod.core.requests.tensor import Allocate, Tensor
from horovod.core.submission import collectives

SOURCES = Path(__file__).resolve().parent / "stand_in"
BLOCKING, IN_PROGRESS = 0, 1
INIT, SPLIT, LAUNCH, KERNEL = 1, 2, 3, 4
SYSTEM_ERROR, REMOTE_ERROR = 2, 6
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
_kept: list[Any] = []


def compiler() -> str | None:
    """The machine's C compiler, None where there is none."""
    return shutil.which(os.environ.get("CC") or "cc")


def build(folder: Path) -> str:
    """Compile the stand-ins into one library, and return its path."""
    chosen = compiler()
    assert chosen is not None
    target = folder / "libstandin.so"
    sources = sorted(map(str, SOURCES.glob("*.c")))
    command = [chosen, "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-fPIC", "-shared", "-pthread"]
    subprocess.run([*command, "-o", str(target), *sources, "-lrt"], check=True)
    return str(target)


class StandIn:
    """The library of a process, with what is not NCCL's or CUDA's own."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.functions = ctypes.CDLL(path)
        self.functions.stand_in_late.argtypes = [ctypes.c_long]
        self.functions.stand_in_nccl.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.c_long]
        self.functions.stand_in_slow.argtypes = [ctypes.c_long]
        self.functions.stand_in_run.argtypes = [ctypes.c_void_p]

    def behave(self, mode: int = IN_PROGRESS, launch: float = 10e-6, abort: float = 0.0, late: float = 300e-6) -> None:
        """How NCCL's calls return, how long a launch and an abort take, and how late streams are at most (seconds)."""
        self.functions.stand_in_nccl(mode, int(launch * 1e9), int(abort * 1e9))
        self.functions.stand_in_late(int(late * 1e9))

    def fail(self, what: int, after: int = 0, code: int = REMOTE_ERROR) -> None:
        """Have the call of this kind after the next ``after`` ones fail behind the caller's back."""
        self.functions.stand_in_fail(what, after, code)

    def slow(self, seconds: float) -> None:
        """How long the next communicator takes to be made on this rank."""
        self.functions.stand_in_slow(int(seconds * 1e9))

    def hold(self, held: bool) -> None:
        """While it is held, no collective begins on the device."""
        self.functions.stand_in_hold(int(held))

    def gpus(self, identities: str) -> None:
        """What NVML tells: identities separated by commas; "-" before one that this process may not use."""
        self.functions.stand_in_gpus(identities.encode())

    def capture(self, begin: bool, mode: int = GLOBAL) -> bool:
        """Begin a capture on the calling thread, or end it. Returns whether it is valid."""
        return bool(self.functions.stand_in_capture(int(begin), mode))

    def operations(self) -> int:
        """How many reductions with a factor there are."""
        return int(self.functions.stand_in_operations())

    def left(self) -> dict[str, int]:
        """What there is still of CUDA's."""
        return {
            name: int(self.functions.stand_in_left(kind)) for kind, name in enumerate(("contexts", "events", "memory"))
        }

    def breaches(self) -> list[str]:
        """Of the rules, since the last call."""
        text = ctypes.create_string_buffer(1 << 14)
        self.functions.stand_in_breaches(text, len(text))
        return text.value.decode().splitlines()

    @contextmanager
    def on_streams_of(
        self,
        push: Callable[[int, Callable[[], None]], None],
        touched: Callable[[int, int], Callable[[], None]],
    ) -> Iterator[None]:
        """A block in which work for streams that are not the library's is handed to a framework.

        Args:
            push: ``push(stream, work)`` puts work on a stream.
            touched: called with a stream and an address that work put there uses; what it returns is called when that is over.
        """
        uses: dict[tuple[int, int], list[Callable[[], None]]] = {}

        def launch(stream: int, item: int) -> None:
            push(stream, lambda: self.functions.stand_in_run(item))

        def watch(stream: int, address: int, change: int) -> None:
            if change > 0:
                uses.setdefault((stream, address), []).append(touched(stream, address))
            else:
                uses[stream, address].pop()()

        launches = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
        watches = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
        _kept.append((launches(launch), watches(watch)))  # a late thread may still call them
        self.functions.stand_in_launcher(_kept[-1][0])
        self.functions.stand_in_watcher(_kept[-1][1])
        try:
            yield
        finally:
            self.functions.stand_in_launcher(launches())
            self.functions.stand_in_watcher(watches())


@contextmanager
def loaded(path: str, gpus: str = "GPU-0,GPU-1", real_nccl: str = "") -> Iterator[StandIn]:
    """A block in which this process finds the library in place of CUDA's, NCCL's and NVML's. It begins before ``init()``.

    Args:
        real_nccl: a library to find in place of NCCL's instead.
    """
    library = StandIn(path)
    library.behave()
    library.fail(0)
    library.gpus(gpus)
    library.breaches()
    before = cuda._FILE, cuda.present, nccl.find, nvml._FILE
    caches = dict(nccl._loaded), list(cuda._loaded)
    cuda._FILE = nvml._FILE = path
    cuda.present = lambda: True
    cuda._loaded.clear()
    nccl.find = lambda: real_nccl or path
    visible = os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        yield library
    finally:
        cuda._FILE, cuda.present, nccl.find, nvml._FILE = before
        nccl._loaded.clear()
        nccl._loaded.update(caches[0])
        cuda._loaded[:] = caches[1]
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible


class Arrays:
    """NumPy arrays as tensors of a device: a binding without a framework, whose stream is one of the library's."""

    def __init__(self) -> None:
        self._word = np.zeros(1, np.float32)
        self.devices = CudaDevices(lambda: "", lambda: (address_of(self._word), self._word))

    def begin(self) -> None:
        """After ``init()``."""
        self.runtime = self.devices.runtime()
        self.stream = self.runtime.new_stream()

    def _submission(self) -> OnDevice:
        return OnDevice(self.runtime, running().device_engine)

    def allreduce_async(
        self,
        arrays: Sequence[Array],
        name: str,
        op: ReduceOp = ReduceOp.SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
        process_set: int | None = 0,
    ) -> Handle:
        """In place, after what the stream was given."""
        with self.runtime.on(self.stream.address):
            submission = self._submission()
            tensors = [self._tensor(submission, each) for each in arrays]
            return collectives.allreduce(
                "grouped_allreduce", name, tensors, tensors, op, prescale, postscale, process_set
            )

    def finish(self, pending: Handle | None = None) -> None:
        """Return when a collective is over; None: all that the stream was given."""
        if pending is None:
            with self.runtime.chosen():
                self.runtime.wait(None, self.runtime.record(self.stream))
            return
        pending.wait()
        assert pending.event is not None
        pending.event.wait()  # outside of runtime.on(): the host waits

    def allreduce(self, arrays: Sequence[Array], name: str, *arguments: Any, **keywords: Any) -> None:
        """:meth:`allreduce_async`; returns when it is over."""
        self.finish(self.allreduce_async(arrays, name, *arguments, **keywords))

    def broadcast(self, array: Array, root: int, name: str) -> None:
        """In place."""
        with self.runtime.on(self.stream.address):
            tensor = self._tensor(self._submission(), array)
            pending = collectives.broadcast("broadcast", name, [tensor], root)
        self.finish(pending)

    def allgather(self, array: Array, name: str) -> Array:
        """A new array."""
        return self._grown(array, lambda tensor, allocate: collectives.allgather("allgather", name, [tensor], allocate))

    def alltoall(self, array: Array, splits: Sequence[int], name: str) -> Array:
        """A new array."""
        return self._grown(
            array, lambda tensor, allocate: collectives.alltoall("alltoall", name, tensor, splits, allocate)
        )

    def reducescatter(self, array: Array, name: str) -> Array:
        """A new array: this rank's part of the sum."""
        size, rank = len(membership.ranks[0]), membership.rank
        part = np.empty(shard_rows(len(array), size)[rank], array.dtype)
        with self.runtime.on(self.stream.address):
            submission = self._submission()
            tensors = [self._tensor(submission, each) for each in (array, part)]
            pending = collectives.reducescatter("reducescatter", name, tensors[:1], tensors[1:], ReduceOp.SUM)
        self.finish(pending)
        return part

    def _tensor(self, submission: OnDevice, array: Array) -> Tensor:
        return submission.tensor(address_of(array), data_type_of(array), array.shape, array)

    def _grown(self, array: Array, submit: Callable[[Tensor, Allocate], Handle]) -> Array:
        made: list[Array] = []

        def allocate(index: int, rows: int) -> Vectors:
            made.append(np.empty(rows, array.dtype))
            return Spans(layout_of(array.dtype, (rows,), self.runtime.device), [address_of(made[0])])

        with self.runtime.on(self.stream.address):
            pending = submit(self._tensor(self._submission(), array), allocate)
        self.finish(pending)
        return made[0]
