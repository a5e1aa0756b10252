"""Framed bytes to and from all peers at once over MPI: the :class:`~horovod.comm.exchange.base.Exchange` of ``mpi``.

MPI carries, and Horovod reduces: results have the same bits as with Horovod's own engines, for every data type, and no
message is longer than :data:`CHUNK_BYTES`, so nothing is limited by what MPI's counts can hold. Messages go between
pairs of ranks, so a rank that does not come is known by name.

* A wait tests requests and sleeps a little between, longer and longer, so that it can be aborted; MPI can do neither.
  That also is what makes MPI's own progress.
* MPI cannot take back what has been posted. So messages are copied through memory of their own, and what is under way at an
  abort is left there, until the process ends.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from horovod.comm.base import OnStall, PeerFailure, Stall, give_up
from horovod.comm.exchange.base import HEADER, Exchange, Mark, mismatch
from horovod.comm.mpi import runtime

CHUNK_BYTES = (512 << 10) + HEADER.size
"""The longest message: a piece of a reduction, with its header."""

WINDOW = 4
"""Messages that are under way at most in one direction between two ranks."""

_TAG = 1
_LOOKS = 50
"""Tests in a row before a wait sleeps: about as long as a small message takes."""
_SHORTEST_SLEEP = 20e-6
_LONGEST_SLEEP = 500e-6


class _Flow:
    """One direction of the traffic with one peer."""

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.queued = 0
        self.done = 0
        self.transfers: deque[deque[memoryview]] = deque()  # not posted yet: of each, what is left
        self.active: deque[tuple[Any, memoryview]] = deque()  # posted, in order: request and the part of a slot
        self.free: list[memoryview] = []
        self.stamp = 0.0
        self.stalls = 0

    def append(self, buffers: Iterable[memoryview]) -> int:
        transfer = deque(buffer for buffer in buffers if buffer.nbytes)
        self.transfers.append(transfer)
        self.queued += sum(buffer.nbytes for buffer in transfer)
        return self.queued

    def slot(self, length: int) -> memoryview:
        """Memory for the next message."""
        memory = self.free.pop() if self.free else memoryview(bytearray(CHUNK_BYTES))
        return memory[:length]

    def release(self, part: memoryview) -> None:
        """The message that was in it is over."""
        self.free.append(memoryview(part.obj))  # the whole bytearray that it is a part of

    def next_length(self) -> int:
        """Bytes of the next message: a chunk of the first transfer, or its rest."""
        return min(CHUNK_BYTES, sum(buffer.nbytes for buffer in self.transfers[0]))


class _Incoming(_Flow):
    """What comes from a peer: posted lengths go ahead of what is unpacked."""

    def __init__(self, peer: int) -> None:
        super().__init__(peer)
        self.lengths: deque[int] = deque()  # of messages that are not posted yet
        self.headers: deque[tuple[int, memoryview, bytes]] = deque()  # place in the flow, buffer, what it must hold

    def expect(self, header: bytes, buffers: Iterable[memoryview]) -> int:
        found = memoryview(bytearray(len(header)))
        start = self.queued
        self.append([found, *buffers])
        self.headers.append((start + len(header), found, header))
        rest = self.queued - start
        while rest:
            self.lengths.append(min(CHUNK_BYTES, rest))
            rest -= self.lengths[-1]
        return self.queued

    def unpack(self, part: memoryview) -> None:
        """Put a message that has come where it belongs."""
        self.done += part.nbytes
        position = 0
        while position < part.nbytes:
            while not self.transfers[0]:
                self.transfers.popleft()
            transfer = self.transfers[0]
            buffer = transfer[0]
            length = min(buffer.nbytes, part.nbytes - position)
            buffer[:length] = part[position : position + length]
            position += length
            if length == buffer.nbytes:
                transfer.popleft()
            else:
                transfer[0] = buffer[length:]
        while self.headers and self.headers[0][0] <= self.done:
            _, found, expected = self.headers.popleft()
            if found != expected:
                raise PeerFailure(self.peer, mismatch(bytes(found), expected))


class MpiExchange(Exchange):
    """All messages of one rank of a group.

    Args:
        communicator: an mpi4py intracommunicator of the group, for this exchange alone. Owned from now on.
        stall_timeout: how long a peer that is waited for may move no byte, before
        on_stall: is told.
    """

    def __init__(self, communicator: Any, stall_timeout: timedelta, on_stall: OnStall = give_up) -> None:
        super().__init__()
        self._mpi = runtime.started()
        self._communicator = communicator
        self._calls = runtime.calls()
        self._stall_timeout = stall_timeout.total_seconds()
        self._on_stall = on_stall
        rank, size = communicator.Get_rank(), communicator.Get_size()
        peers = [peer for peer in range(size) if peer != rank]
        self._outgoing = {peer: _Flow(peer) for peer in peers}
        self._incoming = {peer: _Incoming(peer) for peer in peers}
        self._busy: set[_Flow] = set()

    def send(self, rank: int, *buffers: memoryview) -> Mark:
        flow = self._outgoing[rank]
        self._busy.add(flow)
        return flow, flow.append([memoryview(self._header(buffers)), *buffers])

    def receive(self, rank: int, *buffers: memoryview) -> Mark:
        flow = self._incoming[rank]
        self._busy.add(flow)
        return flow, flow.expect(self._header(buffers), buffers)

    def wait(self, marks: Iterable[Mark]) -> None:
        self._check()
        missing: list[tuple[_Flow, int]] = [mark for mark in marks if mark[0].done < mark[1]]  # type: ignore[misc]  # our own
        now = time.monotonic()
        for flow, _ in missing:
            flow.stamp, flow.stalls = now, 0
        looks, sleep = 0, _SHORTEST_SLEEP
        while missing:
            if self._move():
                looks, sleep = 0, _SHORTEST_SLEEP
                missing = [mark for mark in missing if mark[0].done < mark[1]]
                continue
            self._check()
            looks += 1
            if looks < _LOOKS:
                os.sched_yield()
                continue
            time.sleep(sleep)
            sleep = min(2 * sleep, _LONGEST_SLEEP)
            now = time.monotonic()
            silent = min((flow for flow, _ in missing), key=lambda flow: flow.stamp)
            if now - silent.stamp >= self._stall_timeout:
                silent.stamp, silent.stalls = now, silent.stalls + 1
                self._on_stall(Stall(silent.peer, silent.stalls * self._stall_timeout, silent.stalls))

    def _move(self) -> bool:
        """Post what can be posted, and take note of what is over; whether that was anything."""
        moved = False
        with self._calls:
            for flow in list(self._busy):
                try:
                    moved |= self._receive(flow) if isinstance(flow, _Incoming) else self._send(flow)
                except self._mpi.Exception as error:
                    raise PeerFailure(flow.peer, f"MPI reports: {error.Get_error_string()}") from error
        return moved

    def _send(self, flow: _Flow) -> bool:
        moved = self._over(flow)
        while flow.transfers and len(flow.active) < WINDOW:
            part = flow.slot(flow.next_length())
            transfer, position = flow.transfers[0], 0
            while position < part.nbytes:
                buffer = transfer[0]
                length = min(buffer.nbytes, part.nbytes - position)
                part[position : position + length] = buffer[:length]
                position += length
                if length == buffer.nbytes:
                    transfer.popleft()
                else:
                    transfer[0] = buffer[length:]
            if not transfer:
                flow.transfers.popleft()
            flow.active.append((self._communicator.Isend([part, self._mpi.BYTE], flow.peer, _TAG), part))
            moved = True
        if not flow.active and not flow.transfers:
            self._busy.discard(flow)
        return moved

    def _receive(self, flow: _Incoming) -> bool:
        moved = self._over(flow)
        while flow.lengths and len(flow.active) < WINDOW:
            part = flow.slot(flow.lengths.popleft())
            flow.active.append((self._communicator.Irecv([part, self._mpi.BYTE], flow.peer, _TAG), part))
            moved = True
        if not flow.active and not flow.lengths:
            self._busy.discard(flow)
        return moved

    def _over(self, flow: _Flow) -> bool:
        """Take note of the messages that are over, in their order."""
        moved = False
        while flow.active and flow.active[0][0].Test():
            _, part = flow.active.popleft()
            if isinstance(flow, _Incoming):
                flow.unpack(part)
            else:
                flow.done += part.nbytes
            flow.release(part)
            flow.stamp, flow.stalls = time.monotonic(), 0
            moved = True
        return moved

    def abort(self) -> None:
        self._aborted = True  # a wait looks every half a millisecond

    def close(self) -> None:
        if self._mpi.Is_finalized():
            return
        with self._calls:
            left = [request for flow in self._busy for request in flow.active]
            for flow in self._busy:
                if isinstance(flow, _Incoming):
                    for request, _ in flow.active:
                        request.Cancel()
            if left or self._aborted:
                runtime.abandoned.append(
                    (self._communicator, left)
                )  # the others may be in the middle of something, too
            else:
                self._communicator.Free()
        self._busy.clear()
