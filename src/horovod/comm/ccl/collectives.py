"""Collectives on bytes by oneCCL. Its calls block and cannot be interrupted, so a separate thread of each group makes them.

After an abort that thread may stay in a call forever; the call uses no tensor of the script. oneCCL does not say which rank a
call waits for; :mod:`horovod.comm.bytewise.late_ranks` finds that rank.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import numpy as np

from horovod._base.running_time import running_time
from horovod.comm.base import Aborted, OnStall, PeerFailure, Stall
from horovod.comm.bytewise.base import ByteCollectives
from horovod.comm.bytewise.late_ranks import LateRanks
from horovod.comm.datatypes import Array
from horovod.comm.engine import EngineError
from horovod.comm.spans import address_of

_SLICE = 0.02
"""Seconds between two checks of a wait for an abort or a lost rank."""


_LEAVING_SECONDS = 1.0
"""How long a collective may continue after a rank has closed its connection."""


class Calls(Protocol):
    """The methods of :class:`horovod.comm.ccl.library.Library` that this module uses."""

    def communicator(self, size: int, unique_id: bytes, rank: int) -> Any: ...
    def allgather(self, communicator: Any, source: int, target: int, count: int) -> None: ...
    def alltoall(self, communicator: Any, source: int, target: int, count: int) -> None: ...
    def broadcast(self, communicator: Any, data: int, count: int, root: int) -> None: ...
    def destroy(self, communicator: Any) -> None: ...


class _QueuedCall:
    """A call that the thread makes.

    Attributes:
        number: counts the calls of this group, the same on all ranks.
        call: makes it.
        held: the memory that the call uses, kept alive until it returns.
        over: set when the call has returned.
        error: the exception of the call.
        finish: copies the result to its arrays after the call.
    """

    def __init__(self, number: int, call: Callable[[], None], held: Sequence[Array] = ()) -> None:
        self.number = number
        self.call = call
        self.held = held
        self.over = threading.Event()
        self.error: Exception | None = None
        self.finish: Callable[[], None] = lambda: None


class OneCclCollectives(ByteCollectives):
    """One rank of a group. All ranks must construct it together.

    Args:
        library: makes the calls.
        unique_id: made by one rank, and the same on all.
        rank, size: this rank's index in the group, and the size of the group.
        sockets: a connection with every other rank, by index; this object owns them from now on.
        stall_timeout: how long a collective may wait for a peer.
        on_stall: called when a collective has waited for a peer for ``stall_timeout``.
        deadline: ``time.monotonic`` by which all ranks must have connected.

    Raises:
        EngineError: oneCCL could not connect.
    """

    def __init__(
        self,
        library: Calls,
        unique_id: bytes,
        rank: int,
        size: int,
        sockets: Mapping[int, socket.socket],
        stall_timeout: timedelta,
        on_stall: OnStall,
        deadline: float,
    ) -> None:
        self._library = library
        self._rank = rank
        self._size = size
        self._free: list[Array] = []
        self._stall_timeout = stall_timeout.total_seconds()
        self._on_stall = on_stall
        self._aborted = False
        self._number = 0
        self._latest: _QueuedCall | None = None
        self._communicator: Any = None
        self._late_ranks = LateRanks(sockets)
        self._queue: queue.SimpleQueue[_QueuedCall | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="horovod-oneccl", daemon=True)
        self._thread.start()

        def connect() -> None:
            self._communicator = library.communicator(size, unique_id, rank)

        connecting = self._start(connect)
        connecting.over.wait(max(0.1, deadline - time.monotonic()))
        if connecting.error is not None or not connecting.over.is_set():
            self.close()
            raise EngineError(f"oneCCL cannot connect its ranks: {connecting.error or 'not all called it in time'}")

    def _run(self) -> None:
        while (started := self._queue.get()) is not None:
            try:
                started.call()
            except Exception as error:
                started.error = error
            started.over.set()

    def _start(self, call: Callable[[], None], *held: Array) -> _QueuedCall:
        self._number += 1
        self._latest = _QueuedCall(self._number, call, held)
        self._queue.put(self._latest)
        return self._latest

    def _rows(self, count: int, longest: int) -> Array:
        """Memory of shape [count, longest] that belongs to this module, since oneCCL may use it forever after an abort."""
        memory = next((each for each in self._free if each.size >= count * longest), None)
        if memory is None:
            memory = np.empty(count * longest, np.uint8)
        else:
            self._free = [each for each in self._free if each is not memory]
        return memory[: count * longest].reshape(count, longest)

    def _give_back(self, *rows: Array) -> None:
        self._free += [each if each.base is None else each.base for each in rows]

    def _begin(
        self, call: Callable[[int, int], None], outgoing: Array, incoming: Array, receives: Sequence[Array]
    ) -> _QueuedCall:
        started = self._start(lambda: call(address_of(outgoing), address_of(incoming)), outgoing, incoming)

        def finish() -> None:
            for rank, (row, part) in enumerate(zip(incoming, receives, strict=True)):
                if rank != self._rank:
                    part[:] = row[: part.size]
            self._give_back(outgoing, incoming)

        started.finish = finish
        return started

    def exchange(self, sends: Sequence[Array], receives: Sequence[Array], longest: int) -> _QueuedCall:
        # oneCCL supports equal counts only, so each row is padded to the longest.
        outgoing, incoming = self._rows(self._size, longest), self._rows(self._size, longest)
        for rank, (row, part) in enumerate(zip(outgoing, sends, strict=True)):
            if rank != self._rank:
                row[: part.size] = part
        return self._begin(
            lambda source, target: self._library.alltoall(self._communicator, source, target, longest),
            outgoing,
            incoming,
            receives,
        )

    def gather(self, own: Array, receives: Sequence[Array], longest: int) -> _QueuedCall:
        outgoing, incoming = self._rows(1, longest), self._rows(self._size, longest)
        outgoing[0, : own.size] = own
        return self._begin(
            lambda source, target: self._library.allgather(self._communicator, source, target, longest),
            outgoing,
            incoming,
            receives,
        )

    def broadcast(self, data: Array, root: int) -> _QueuedCall:
        copy = self._rows(1, data.size)
        if self._rank == root:
            copy[0] = data
        started = self._start(
            lambda: self._library.broadcast(self._communicator, address_of(copy), data.size, root), copy
        )

        def finish() -> None:
            data[:] = copy[0]
            self._give_back(copy)

        started.finish = finish
        return started

    def wait(self, started: _QueuedCall) -> None:
        began, stalls = time.monotonic(), 0
        left: float | None = None
        while True:
            if self._aborted:
                raise Aborted("this communicator was aborted")
            planned = time.monotonic() + _SLICE
            if started.over.wait(_SLICE):
                break
            now = time.monotonic()
            running_time.turn(planned, now)
            waited = running_time.age(began, now)
            gone = self._late_ranks.gone()
            if gone and left is None:
                left = waited  # a rank that has done its part of the last collective may leave before others have
            if gone and left is not None and waited - left > _LEAVING_SECONDS:
                raise PeerFailure(gone[0], "it closed its connection", suspected=True)
            if waited > self._stall_timeout / 2:
                self._late_ranks.tell(started.number)
            if waited >= (stalls + 1) * self._stall_timeout:
                stalls += 1
                self._on_stall(Stall(self._late_ranks.missing(started.number), stalls * self._stall_timeout, stalls))
        if started.error is not None:
            raise PeerFailure(self._late_ranks.missing(started.number), str(started.error), suspected=True)
        started.finish()

    def abort(self) -> None:
        self._aborted = True  # a wait checks this between its slices

    def descriptors(self) -> list[int]:
        return self._late_ranks.descriptors()

    def close(self) -> None:
        idle = self._latest is None or self._latest.over.is_set()
        if idle and self._communicator is not None and not self._aborted:
            # Not after an abort, since destroying the communicator waits for the other ranks.
            self._start(lambda: self._library.destroy(self._communicator))
        self._queue.put(None)
        if idle:
            self._thread.join()
        self._late_ranks.close()
