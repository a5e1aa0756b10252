"""Collectives on bytes by PyTorch's ``ProcessGroupGloo`` alone: no group of ``torch.distributed`` is made or touched.

* Gloo's operations run on threads of its process group. A wait for an operation is cut into slices, so that it can be aborted.
* Gloo's operations use the caller's arrays, and cannot be cancelled. So when a wait fails, the group's sockets are shut down
  before the error is raised. That ends all running operations here and on all other ranks.
* Gloo does not say which rank an operation waits for; :mod:`horovod.comm.bytewise.late_ranks` finds that rank.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import distributed

from horovod._base.running_time import running_time
from horovod.comm.base import Aborted, OnStall, PeerFailure, Stall
from horovod.comm.bytewise.base import ByteCollectives
from horovod.comm.bytewise.late_ranks import LateRanks
from horovod.comm.datatypes import Array
from horovod.comm.engine import EngineError
from horovod.comm.gloo.rendezvous_store import ConnectionStore
from horovod.comm.gloo.sockets import shut_down, sockets_of
from horovod.comm.lasting import lasting_list
from horovod.comm.ranges import split
from horovod.comm.spans import address_of, bytes_at

_log = logging.getLogger("horovod.comm")

_SLICE = timedelta(milliseconds=20)
"""Time between two checks of a wait for an abort."""

_LONGEST = timedelta(days=10)
"""Gloo's own time limit. It is long, because this module detects stalls itself."""

_GONE_SECONDS = 1.0
"""How long to look for a rank whose end has failed an operation."""

_SHUT_DOWN_SECONDS = 5.0
"""How long operations may take to fail after their sockets have been shut down."""

_Group: Any = distributed.ProcessGroupGloo  # PyTorch declares some of its methods only
_left = lasting_list()
"""Groups that could not be ended, with their operations. Destroying one would wait for its operations, for days."""


class GlooCollectives(ByteCollectives):
    """One rank of a group. All ranks must construct it together.

    Args:
        rank: this rank's index in the group.
        sockets: a connection with every other rank, by index; this object owns them from now on.
        hosts: the host name of each rank, by index.
        interface: the network interface to use, the first of a list with commas; "" for the one that the sockets use.
        stall_timeout: how long a collective may wait for a peer.
        on_stall: called when a collective has waited for a peer for ``stall_timeout``.
        deadline: ``time.monotonic`` by which all ranks must have connected.

    Raises:
        EngineError: Gloo could not connect.
    """

    def __init__(
        self,
        rank: int,
        sockets: Mapping[int, socket.socket],
        hosts: Sequence[str],
        interface: str,
        stall_timeout: timedelta,
        on_stall: OnStall,
        deadline: float,
    ) -> None:
        self._rank = rank
        self._stall_timeout = stall_timeout.total_seconds()
        self._on_stall = on_stall
        self._aborted = False
        self._number = 0
        self._buffers: list[Array] = []
        self._store = ConnectionStore(sockets, deadline)
        self._open: list[Any] = []
        self._left = False  # whether an operation has not ended, so that destroying the group would wait for it
        try:
            if interface:
                device = _Group.create_device(interface=interface.split(",")[0])
            else:
                device = _Group.create_device(hostname=_own_address(rank, sockets, hosts))
            options = _Group._Options()
            options._devices = [device]
            options._timeout = timedelta(seconds=max(1.0, deadline - time.monotonic()))
            self._group = _Group(self._store, rank, len(hosts), options)
            self._store.finish()
            self._group._set_default_timeout(_LONGEST)
        except (RuntimeError, OSError) as error:
            for connection in sockets.values():
                connection.close()
            raise EngineError(f"Gloo cannot connect its ranks: {error}") from error
        self._late_ranks = LateRanks(sockets)

    def exchange(self, sends: Sequence[Array], receives: Sequence[Array], longest: int) -> _StartedWork:
        self._check()
        source, target = self._joined(sends), self._joined(receives)
        if source.buffer is not None:
            np.concatenate(source.parts, out=source.data)
        work = self._group.alltoall_base(
            torch.from_numpy(target.data), torch.from_numpy(source.data), target.counts, source.counts
        )
        return self._start(work, source, target)

    def gather(self, own: Array, receives: Sequence[Array], longest: int) -> _StartedWork:
        return self.exchange([own] * len(receives), receives, longest)

    def _joined(self, arrays: Sequence[Array]) -> _Joined:
        """The arrays of the other ranks as one array: in place if they are adjacent in memory, else in a buffer."""
        counts = [0 if rank == self._rank else array.size for rank, array in enumerate(arrays)]
        parts = [array for array, count in zip(arrays, counts, strict=True) if count]
        starts = [address_of(part) for part in parts]
        ends = [start + part.size for start, part in zip(starts, parts, strict=True)]
        if ends[:-1] == starts[1:]:
            return _Joined(counts, parts, bytes_at(starts[0] if starts else 0, sum(counts)))
        buffer = next((each for each in self._buffers if each.size >= sum(counts)), None)
        if buffer is None:
            buffer = np.empty(sum(counts), np.uint8)
        else:
            self._buffers = [each for each in self._buffers if each is not buffer]
        return _Joined(counts, parts, buffer[: sum(counts)], buffer)

    def broadcast(self, data: Array, root: int) -> _StartedWork:
        self._check()
        options = distributed.BroadcastOptions()
        options.rootRank = root
        return self._start(self._group.broadcast([torch.from_numpy(bytes_at(address_of(data), data.size))], options))

    def _check(self) -> None:
        """Raise Aborted after an abort, without starting an operation: if a connection ends in the middle of a message, Gloo
        waits for the rest forever."""
        if self._aborted:
            self._stop()
            raise Aborted("this communicator was aborted")

    def _start(self, work: Any, source: _Joined | None = None, target: _Joined | None = None) -> _StartedWork:
        self._number += 1
        self._open.append(work)
        return _StartedWork(work, self._number, source, target)

    def wait(self, started: _StartedWork) -> None:
        try:
            self._wait(started.work, started.number)
        except BaseException:
            self._stop()
            raise
        self._open.remove(started.work)
        for joined in (started.source, started.target):
            if joined is not None and joined.buffer is not None:
                if joined is started.target:
                    for part, arrived in zip(
                        joined.parts, split(joined.data, [each.size for each in joined.parts]), strict=True
                    ):
                        part[:] = arrived
                self._buffers.append(joined.buffer)

    def _wait(self, work: Any, number: int) -> None:
        began, stalls, reported = time.monotonic(), 0, False
        while True:
            if self._aborted:
                raise Aborted("this communicator was aborted")
            over = work.is_completed()  # read before the wait, since the operation may complete right after its slice
            planned = time.monotonic() + _SLICE.total_seconds()
            try:
                work.wait(_SLICE)
                return
            except RuntimeError as error:
                if over:
                    raise self._failure(number, error) from error
            now = time.monotonic()
            running_time.turn(planned, now)
            waited = running_time.age(began, now)
            if not reported and waited > self._stall_timeout / 2:
                reported = True
                self._late_ranks.tell(number)
            if waited >= (stalls + 1) * self._stall_timeout:
                stalls += 1
                self._on_stall(Stall(self._late_ranks.missing(number), stalls * self._stall_timeout, stalls))

    def _failure(self, number: int, error: RuntimeError) -> PeerFailure | Aborted:
        """The exception for an operation that has failed, usually because a rank has ended."""
        if self._aborted:
            return Aborted("this communicator was aborted")
        gone = self._late_ranks.gone(_GONE_SECONDS)
        if gone:
            return PeerFailure(gone[0], "it closed its connection", suspected=True)
        return PeerFailure(self._late_ranks.missing(number), f"Gloo reports: {error}", suspected=True)

    def abort(self) -> None:
        self._aborted = True  # a wait checks this between its slices

    def descriptors(self) -> list[int]:
        return [*self._sockets(), *self._late_ranks.descriptors()]

    def _sockets(self) -> list[int]:
        return sockets_of(self._store.own.values(), self._store.others.values())

    def _stop(self) -> None:
        """End all running operations, so that Gloo no longer uses their memory.

        If that fails once, later calls do nothing."""
        if self._left:
            return
        if not all(work.is_completed() for work in self._open):
            shut_down(self._sockets())
        deadline = time.monotonic() + _SHUT_DOWN_SECONDS
        for work in self._open:
            while not work.is_completed() and time.monotonic() < deadline:
                try:
                    work.wait(_SLICE)
                except RuntimeError:
                    pass  # the operation or its slice is over; the loop tells which
        if all(work.is_completed() for work in self._open):
            self._open.clear()
        else:
            self._left = True
            _left.append((self._group, self._store, self._open, self._buffers))
            _log.error(
                "rank %d of the group: Gloo has not ended its operations; they may still use tensors of collectives that have "
                "failed, so end this process instead of using them again",
                self._rank,
            )

    def may_still_write(self) -> bool:
        return self._left

    def close(self) -> None:
        self._stop()
        self._late_ranks.close()
        del self._group


class _Joined(NamedTuple):
    """The arrays of the other ranks, joined to one.

    Attributes:
        counts: bytes by rank; 0 for this rank.
        parts: the arrays that are not empty, in rank order.
        data: memory for their concatenation.
        buffer: the memory of which ``data`` is a part; None if ``data`` is the memory of ``parts``.
    """

    counts: list[int]
    parts: Sequence[Array]
    data: Array
    buffer: Array | None = None


class _StartedWork(NamedTuple):
    """An operation of Gloo, its number in this group, and its memory."""

    work: Any
    number: int
    source: _Joined | None
    target: _Joined | None


def _own_address(rank: int, sockets: Mapping[int, socket.socket], hosts: Sequence[str]) -> str:
    """This rank's own address on a connection to a rank of another host; the loopback address if there is none."""
    for peer, connection in sockets.items():
        if hosts[peer] != hosts[rank] and connection.family != socket.AF_UNIX:
            return str(connection.getsockname()[0])
    return "127.0.0.1"
