"""Collectives on bytes by PyTorch's ``ProcessGroupGloo``, on its own: no group of ``torch.distributed`` is made or touched.

* Gloo's operations run on a thread of its process group. A wait for one is cut in slices, so that it can be aborted.
* An operation cannot be taken back. When the group is closed, its sockets are shut down, which fails what is under way
  here and on all other ranks, and lets the thread end.
* Gloo does not say which rank an operation waits for; see :mod:`horovod.comm.bytewise.attendance`.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from horovod.comm.base import Aborted, OnStall, PeerFailure, Stall
from horovod.comm.bytewise.attendance import Attendance
from horovod.comm.bytewise.base import ByteCollectives
from horovod.comm.datatypes import Array
from horovod.comm.engine import EngineError
from horovod.comm.gloo.sockets import shut_down, sockets_of
from horovod.comm.gloo.store import ConnectionStore

_SLICE = timedelta(milliseconds=20)
"""How long a wait lasts until it looks whether it was aborted."""

_LONGEST = timedelta(days=10)
"""Gloo's own limit: who waits too long is decided elsewhere."""

_GONE_SECONDS = 1.0
"""How long to look for the rank whose end has failed an operation."""

_SHUT_DOWN_SECONDS = 5.0
"""How long an operation may take to fail when its sockets have been shut down."""

_Group: Any = distributed.ProcessGroupGloo  # PyTorch declares some of its methods only
_left: list[Any] = []
"""Groups that could not be ended: to destroy one would wait for its operations."""


class GlooCollectives(ByteCollectives):
    """One rank of a group. Every rank makes its own at the same time.

    Args:
        sockets: a connection with every other rank. Owned from now on.
        hosts: the host name of each rank.
        interface: the network interface to use; "" for that which the connections use.
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
        self._stall_timeout = stall_timeout.total_seconds()
        self._on_stall = on_stall
        self._aborted = False
        self._started = 0
        self._store = ConnectionStore(sockets, deadline)
        self._open: list[Any] = []
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
        self._attendance = Attendance(sockets)

    def allgather(self, own: Array, everybody: Array) -> Any:
        return self._start(self._group._allgather_base(torch.from_numpy(everybody), torch.from_numpy(own)))

    def alltoall(
        self, source: Array, target: Array, send_counts: Sequence[int], receive_counts: Sequence[int], longest: int
    ) -> Any:
        work = self._group.alltoall_base(
            torch.from_numpy(target), torch.from_numpy(source), list(receive_counts), list(send_counts)
        )
        return self._start(work)

    def broadcast(self, data: Array, root: int) -> Any:
        options = distributed.BroadcastOptions()
        options.rootRank = root
        return self._start(self._group.broadcast([torch.from_numpy(data)], options))

    def _start(self, work: Any) -> tuple[Any, int]:
        self._started += 1
        self._open.append(work)
        return work, self._started

    def wait(self, started: tuple[Any, int]) -> None:
        work, number = started
        began, stalls, told = time.monotonic(), 0, False
        while True:
            if self._aborted:
                raise Aborted("this communicator was aborted")
            over = work.is_completed()  # asked before: it may be over just after its slice
            try:
                work.wait(_SLICE)
                break
            except RuntimeError as error:
                if over:
                    raise self._failure(number, error) from error
            waited = time.monotonic() - began
            if not told and waited > self._stall_timeout / 2:
                told = True
                self._attendance.tell(number)
            if waited >= (stalls + 1) * self._stall_timeout:
                stalls += 1
                self._on_stall(Stall(self._attendance.missing(number), stalls * self._stall_timeout, stalls))
        self._open.remove(work)

    def _failure(self, number: int, error: RuntimeError) -> PeerFailure | Aborted:
        """What an operation's error amounts to: usually the end of a rank."""
        if self._aborted:
            return Aborted("this communicator was aborted")
        gone = self._attendance.gone(_GONE_SECONDS)
        if gone:
            return PeerFailure(gone[0], "it closed its connection", suspected=True)
        return PeerFailure(self._attendance.missing(number), f"Gloo reports: {error}", suspected=True)

    def abort(self) -> None:
        self._aborted = True  # a wait looks every few milliseconds

    def descriptors(self) -> list[int]:
        return [*self._sockets(), *self._attendance.descriptors()]

    def _sockets(self) -> list[int]:
        return sockets_of(self._store.own.values(), self._store.others.values())

    def close(self) -> None:
        if not all(work.is_completed() for work in self._open):
            shut_down(self._sockets())
        self._attendance.close()
        deadline = time.monotonic() + _SHUT_DOWN_SECONDS
        for work in self._open:
            while not work.is_completed() and time.monotonic() < deadline:
                try:
                    work.wait(_SLICE)
                except RuntimeError:
                    pass  # it has failed, or has still to
        if not all(work.is_completed() for work in self._open):
            _left.append(self._group)
        del self._group
        self._open.clear()


def _own_address(rank: int, sockets: Mapping[int, socket.socket], hosts: Sequence[str]) -> str:
    """The address by which this rank has reached one on another host; the loopback address where there is none."""
    for peer, connection in sockets.items():
        if hosts[peer] != hosts[rank] and connection.family != socket.AF_UNIX:
            return str(connection.getsockname()[0])
    return "127.0.0.1"
