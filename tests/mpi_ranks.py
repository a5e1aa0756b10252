"""Engines over MPI for the tables: a group whose ranks are processes under ``mpiexec``, each driven by a stand-in in
the test's process.

A stand-in is a :class:`Communicator` that has its process do what is asked of it. Run as a program, this is such a process:
``python mpi_ranks.py SOCKET SECONDS PIECE_BYTES``.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import horovod
from horovod.comm.base import Aborted, Communicator, PeerFailure
from horovod.comm.compression.block_reduction import Errors
from horovod.comm.compression.blocks import BlockFormat
from horovod.comm.datatypes import Array
from horovod.comm.engine import Bootstrap, EngineGroup, EngineSettings, MpiRanks
from horovod.comm.mpi.engine import MpiEngine
from horovod.comm.reduction import ReduceOp
from horovod.comm.spans import Vectors, arrays_of
from launcher.harness import EAGER
from time_limits import SOON

BIN = Path(sys.executable).parent
ROOT = BIN.parent / "mpi"
"""Where ``make`` installs the wheels of MPIs, each under its name."""
START_SECONDS = SOON
LENGTH = struct.Struct("<Q")


def prefix_of(name: str) -> Path | None:
    """Where a wheel's MPI was installed; None where it was not."""
    return ROOT / name if (ROOT / name / "bin" / "mpiexec").exists() else None


def command(prefix: Path, size: int) -> tuple[list[str], dict[str, str]]:
    """What starts that many processes under this MPI, and the environment for it."""
    environment = {name: value for name, value in os.environ.items() if "HOROVOD" not in name}
    (library,) = sorted((prefix / "lib").glob("libmpi.so.*"))[:1]
    environment |= {
        "PATH": f"{prefix / 'bin'}:{environment['PATH']}",
        "MPI4PY_LIBMPI": str(library),
        "PYTHONPATH": f"{Path(horovod.__file__).resolve().parents[1]}:{Path(__file__).parent}:{EAGER}",
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OPAL_PREFIX": str(prefix),
    }
    return [str(prefix / "bin" / "mpiexec"), "--bind-to", "none", "-n", str(size)], environment


def send(connection: socket.socket, value: Any) -> None:
    body = pickle.dumps(value, protocol=5)
    connection.sendall(LENGTH.pack(len(body)) + body)


def receive(connection: socket.socket) -> Any:
    return pickle.loads(_exactly(connection, *LENGTH.unpack(_exactly(connection, LENGTH.size))))


def _exactly(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = connection.recv(min(1 << 20, length - len(data)))
        if not part:
            raise ConnectionError("the other side has ended")
        data += part
    return bytes(data)


class Failed(NamedTuple):
    """An exception, which need not be picklable."""

    kind: str
    arguments: tuple[Any, ...]

    @classmethod
    def of(cls, error: Exception) -> Failed:
        if isinstance(error, PeerFailure):
            return cls("PeerFailure", (error.rank, error.reason, error.suspected))
        return cls(type(error).__name__, (str(error),))

    def error(self) -> Exception:
        kinds: dict[str, Callable[..., Exception]] = {"PeerFailure": PeerFailure, "Aborted": Aborted}
        return kinds.get(self.kind, lambda text: AssertionError(f"{self.kind}: {text}"))(*self.arguments)


class Processes:
    """The processes of one group; they end when all stand-ins are closed."""

    def __init__(self, prefix: Path, size: int, timeout: timedelta, piece_bytes: int) -> None:
        self._open = size
        self._lock = threading.Lock()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by closed()
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/socket")
            listener.listen(size)
            listener.settimeout(START_SECONDS)
            words, environment = command(prefix, size)
            program = [sys.executable, __file__, f"{folder}/socket", str(timeout.total_seconds()), str(piece_bytes)]
            self._process = subprocess.Popen(
                [*words, *program],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
            )
            try:
                connections = [listener.accept()[0] for _ in range(size)]
                self.connections = {receive(connection): connection for connection in connections}
                for rank in range(size):
                    assert receive(self.connections[rank]) == "ready"
            except (OSError, KeyError) as error:
                self._process.kill()
                raise AssertionError(f"no group under {prefix}: {self._output()}") from error

    def _output(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def closed(self) -> None:
        """One stand-in more is."""
        with self._lock:
            self._open -= 1
            if self._open:
                return
        try:
            self._process.wait(SOON)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for connection in self.connections.values():
            connection.close()
        self._log.close()


class StandIn(Communicator):
    """One rank's communicator, which lives in a process of its own."""

    name = "mpi"

    def __init__(self, processes: Processes, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._processes = processes
        self._connection = processes.connections[rank]
        self._lock = threading.Lock()
        self._closed = False

    def _call(self, method: str, inputs: Vectors, outputs: Vectors, *rest: Any) -> None:
        """Have it done; outputs that are inputs are so over there, too."""
        sources, targets = arrays_of(inputs), arrays_of(outputs)
        source_indices = [
            next((index for index, source in enumerate(sources) if source is target), -1) for target in targets
        ]
        shapes = [(target.size, target.dtype) for target in targets]
        with self._lock:
            send(self._connection, (method, list(sources), source_indices, shapes, rest))
        found = receive(self._connection)
        if isinstance(found, Failed):
            raise found.error()
        for target, array in zip(targets, found, strict=True):
            target[:] = array

    def allreduce(self, inputs: Vectors, outputs: Vectors, op: ReduceOp, prescale: float, postscale: float) -> None:
        self._call("allreduce", inputs, outputs, op, prescale, postscale)

    def allreduce_compressed(
        self, inputs: Vectors, outputs: Vectors, prescale: float, postscale: float, form: BlockFormat, errors: Errors
    ) -> None:
        """Errors that are kept over there are not brought back."""
        self._call("allreduce_compressed", inputs, outputs, prescale, postscale, form, errors)

    def allgather(self, inputs: Vectors, outputs: Vectors, counts: Sequence[Sequence[int]]) -> None:
        self._call("allgather", inputs, outputs, counts)

    def broadcast(self, vectors: Vectors, root: int) -> None:
        self._call("broadcast", vectors, vectors, root)

    def alltoall(
        self, source: Vectors, target: Vectors, sent: Sequence[int], received: Sequence[int], longest: int
    ) -> None:
        self._call("alltoall", source, target, sent, received, longest)

    def reducescatter(
        self,
        inputs: Vectors,
        outputs: Vectors,
        counts: Sequence[Sequence[int]],
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> None:
        self._call("reducescatter", inputs, outputs, counts, op, prescale, postscale)

    def barrier(self) -> None:
        self._call("barrier", [], [])

    def abort(self) -> None:
        if not self._closed:
            with self._lock:
                send(self._connection, ("abort",))

    def close(self) -> None:
        self._closed = True
        # The first process that ends after an abort does so without MPI's leave, and the launcher ends the others.
        with self._lock, suppress(OSError):
            send(self._connection, ("close",))
        self._processes.closed()


def group_under(name: str, size: int, timeout: timedelta, piece_bytes: int) -> list[Communicator]:
    """A new group under the MPI of that name."""
    prefix = prefix_of(name)
    assert prefix is not None
    processes = Processes(prefix, size, timeout, piece_bytes)
    return [StandIn(processes, rank, size) for rank in range(size)]


# What follows runs in the processes.


def serve(path: str, seconds: str, piece_bytes: str) -> None:
    import numpy as np

    from horovod.comm.mpi.exchange import MpiExchange
    from horovod.comm.mpi.runtime import communicator_of, initialised_mpi

    world = initialised_mpi().COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    send(connection, rank)
    where = MpiRanks(None, size, tuple(range(size)))
    group = EngineGroup(
        rank, size, ("here",) * size, EngineSettings(stall_timeout=timedelta(seconds=float(seconds))), where
    )
    engine = MpiEngine()
    assert not engine.obstacle(group), engine.obstacle(group)
    communicator: Communicator
    if int(piece_bytes):
        from horovod.comm.mpi.engine import MpiCommunicator

        exchange = MpiExchange(communicator_of(where, 1, time.monotonic() + SOON), group.settings.stall_timeout)
        communicator = MpiCommunicator(rank, size, exchange, int(piece_bytes))
    else:
        communicator = engine.build(group, Bootstrap((1).to_bytes(4, "little")), time.monotonic() + START_SECONDS)
    send(connection, "ready")
    aborted = False

    def run(
        method: str, sources: list[Array], source_indices: list[int], shapes: list[Any], rest: tuple[Any, ...]
    ) -> None:
        targets = [
            sources[source_index] if source_index >= 0 else np.full(length * dtype.itemsize, 0xA5, np.uint8).view(dtype)
            for source_index, (length, dtype) in zip(source_indices, shapes, strict=True)
        ]
        found: Any = targets
        try:
            with np.errstate(all="ignore"):
                if method == "barrier":
                    communicator.barrier()
                elif method == "broadcast":
                    communicator.broadcast(targets, *rest)
                else:
                    getattr(communicator, method)(sources, targets, *rest)
        except Exception as error:
            found = Failed.of(error)
        send(connection, found)

    while True:
        method, *arguments = receive(connection)
        if method == "abort":
            aborted = True
            communicator.abort()
        elif method == "close":
            communicator.close()
            break
        else:
            arguments = [
                [np.array(array) for array in argument] if number == 0 else argument
                for number, argument in enumerate(arguments)
            ]
            threading.Thread(target=run, args=(method, *arguments), daemon=True).start()
    connection.close()
    if aborted:
        os._exit(0)


if __name__ == "__main__":
    from mpi_ranks import serve as serve_here  # so that what is pickled bears the name that the other side imports

    serve_here(*sys.argv[1:])
