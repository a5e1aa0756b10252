"""Framed bytes to and from all peers at once over MPI: the :class:`~horovod.comm.exchange.base.Exchange` of ``mpi``.

MPI carries, and Horovod reduces: results have the same bits as with Horovod's own engines, for every data type, and no
message is longer than :data:`CHUNK_BYTES`, so nothing is limited by what MPI's counts can hold. Messages go between
pairs of ranks, so a rank that does not come is known by name.

* A wait tests requests and sleeps a little between, longer and longer, so that it can be aborted; MPI can do neither.
  That also is what makes MPI's own progress.
* Large messages go straight from and to where their bytes lie. When a wait fails, MPI takes back what was to be received, so
  that it writes into no tensor later. It never takes back what was sent: :meth:`MpiExchange.may_still_read`.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np

from horovod.comm.base import OnStall, PeerFailure, Stall, give_up
from horovod.comm.exchange.base import HEADER, Exchange, Mark, mismatch
from horovod.comm.mpi import runtime

CHUNK_BYTES = 2 << 20
"""The longest message, and the largest piece of a reduction."""

TOGETHER_BYTES = 32 << 10
"""A transfer that is no longer is one message with its header; else the header has one of its own."""

WINDOW = 4
"""Messages that are under way at most in one direction between two ranks."""

_TAG = 1
_LOOKS, _LOOKS_WITH_A_CORE = 50, 1000
"""Tests in a row before a wait sleeps: about as long as a small message takes; a piece, where the rank has a core to itself."""
_SHORTEST_SLEEP = 20e-6
_LONGEST_SLEEP = 500e-6
_WITHDRAW_SECONDS = 2.0
"""How long to wait for what MPI has begun to receive when a wait fails."""

_log = logging.getLogger("horovod.comm")


class _Message(NamedTuple):
    """One that is posted: its request, what MPI reads or writes, and where that belongs if it is memory of this module."""

    request: Any
    data: memoryview
    places: Sequence[memoryview]


def _lengths(size: int) -> Iterator[int]:
    """The messages of one transfer, the same on both sides."""
    if size <= TOGETHER_BYTES:
        yield size
        return
    yield HEADER.size
    for start in range(HEADER.size, size, CHUNK_BYTES):
        yield min(CHUNK_BYTES, size - start)


class _Flow:
    """One direction of the traffic with one peer."""

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.queued = 0
        self.done = 0
        self.buffers: deque[memoryview] = deque()  # what is not posted yet
        self.lengths: deque[int] = deque()  # of the messages in which it goes
        self.active: deque[_Message] = deque()  # posted, in order
        self.free: list[memoryview] = []
        self.stamp = 0.0
        self.stalls = 0

    def append(self, buffers: Iterable[memoryview]) -> int:
        """Queue one transfer, which begins with its header."""
        before = self.queued
        for buffer in buffers:
            if buffer.nbytes:
                self.buffers.append(buffer)
                self.queued += buffer.nbytes
        self.lengths.extend(_lengths(self.queued - before))
        return self.queued

    def take(self) -> tuple[memoryview, Sequence[memoryview]]:
        """The memory of the next message, and where its bytes belong if that is not there."""
        length = self.lengths.popleft()
        places, missing = [], length
        while missing:
            buffer = self.buffers.popleft()
            if buffer.nbytes > missing:
                self.buffers.appendleft(buffer[missing:])
                buffer = buffer[:missing]
            places.append(buffer)
            missing -= buffer.nbytes
        if len(places) == 1:
            return places[0], ()
        slot = self.free.pop() if self.free else np.empty(CHUNK_BYTES, np.uint8).data
        return slot[:length], places

    def finish(self) -> _Message:
        """The first message is over."""
        message = self.active.popleft()
        self.done += message.data.nbytes
        self.stamp, self.stalls = time.monotonic(), 0
        return message

    def release(self, message: _Message) -> None:
        """Its memory may serve another."""
        if message.places:
            self.free.append(memoryview(message.data.obj))  # the whole array that it is a part of


class _Incoming(_Flow):
    """What comes from a peer, and what its headers must be."""

    def __init__(self, peer: int) -> None:
        super().__init__(peer)
        self.headers: deque[tuple[int, memoryview, bytes]] = deque()  # place in the flow, buffer, what it must hold

    def expect(self, header: bytes, buffers: Iterable[memoryview]) -> int:
        found = memoryview(bytearray(len(header)))
        self.headers.append((self.queued + len(header), found, header))
        return self.append([found, *buffers])

    def arrived(self, message: _Message) -> None:
        """Put a message where it belongs, and look at the headers that have come by now."""
        start = 0
        for place in message.places:
            place[:] = message.data[start : start + place.nbytes]
            start += place.nbytes
        while self.headers and self.headers[0][0] <= self.done:
            _, found, expected = self.headers.popleft()
            if found != expected:
                raise PeerFailure(self.peer, mismatch(bytes(found), expected))


class MpiExchange(Exchange[_Flow]):
    """All messages of one rank of a group.

    Args:
        communicator: an mpi4py intracommunicator of the group, for this exchange alone. Owned from now on.
        stall_timeout: how long a peer that is waited for may move no byte, before
        on_stall: is told.
        spins: the rank has a core to itself.
    """

    def __init__(
        self, communicator: Any, stall_timeout: timedelta, on_stall: OnStall = give_up, spins: bool = False
    ) -> None:
        super().__init__()
        self._mpi = runtime.started()
        self._communicator = communicator
        self._calls = runtime.calls()
        self._stall_timeout = stall_timeout.total_seconds()
        self._on_stall = on_stall
        self._looks = _LOOKS_WITH_A_CORE if spins else _LOOKS
        rank, size = communicator.Get_rank(), communicator.Get_size()
        peers = [peer for peer in range(size) if peer != rank]
        self._outgoing = {peer: _Flow(peer) for peer in peers}
        self._incoming = {peer: _Incoming(peer) for peer in peers}
        self._busy: set[_Flow] = set()

    def send(self, rank: int, *buffers: memoryview) -> Mark[_Flow]:
        flow = self._outgoing[rank]
        self._busy.add(flow)
        return flow, flow.append([memoryview(self._header(buffers)), *buffers])

    def receive(self, rank: int, *buffers: memoryview) -> Mark[_Flow]:
        flow = self._incoming[rank]
        self._busy.add(flow)
        return flow, flow.expect(self._header(buffers), buffers)

    def wait(self, marks: Iterable[Mark[_Flow]]) -> None:
        try:
            self._wait(marks)
        except BaseException:
            self._withdraw()
            raise

    def _wait(self, marks: Iterable[Mark[_Flow]]) -> None:
        self._check()
        missing = [mark for mark in marks if mark[0].done < mark[1]]
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
            if looks < self._looks:
                os.sched_yield()
                continue
            time.sleep(sleep)  # MPI has no wait that an abort can end
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
                    moved |= self._advance(flow)
                except self._mpi.Exception as error:
                    raise PeerFailure(flow.peer, f"MPI reports: {error.Get_error_string()}") from error
        return moved

    def _advance(self, flow: _Flow) -> bool:
        moved, incoming = False, isinstance(flow, _Incoming)
        while flow.active and flow.active[0].request.Test():
            message = flow.finish()
            if isinstance(flow, _Incoming):
                flow.arrived(message)
            flow.release(message)
            moved = True
        post = self._communicator.Irecv if incoming else self._communicator.Isend
        while flow.lengths and len(flow.active) < WINDOW:
            data, places = flow.take()
            if not incoming:
                start = 0
                for place in places:
                    data[start : start + place.nbytes] = place
                    start += place.nbytes
            flow.active.append(_Message(post([data, self._mpi.BYTE], flow.peer, _TAG), data, places))
            moved = True
        if not flow.active:
            self._busy.discard(flow)
        return moved

    def _withdraw(self) -> None:
        """After a failure: have MPI write into nobody's memory any more."""
        left: list[_Message] = []
        with self._calls:
            for flow in self._incoming.values():
                for message in flow.active:
                    with suppress(self._mpi.Exception):  # it is over, with an error
                        message.request.Cancel()
                        left.append(message)
                flow.active.clear()
        deadline = time.monotonic() + _WITHDRAW_SECONDS
        while True:
            with self._calls:
                left = [message for message in left if not self._ended(message)]
            if not left or time.monotonic() > deadline:
                break
            time.sleep(_LONGEST_SLEEP)  # as above
        if left:
            runtime.abandoned.append(left)
            _log.error(
                "rank %d of the group: MPI has not ended what it had begun to receive; it may still write into tensors of "
                "collectives that have failed, so end this process instead of using them again",
                self._communicator.Get_rank(),
            )

    def _ended(self, message: _Message) -> bool:
        try:
            return bool(message.request.Test())
        except self._mpi.Exception:
            return True

    def may_still_read(self) -> bool:
        return any(flow.active for flow in self._outgoing.values())

    def abort(self) -> None:
        self._aborted = True  # a wait looks every half a millisecond

    def close(self) -> None:
        if self._mpi.Is_finalized():
            return
        left = [message for flow in self._outgoing.values() for message in flow.active]
        with self._calls:
            if left or self._aborted:
                runtime.abandoned.append((self._communicator, left))  # others may be in the middle of something, too
            else:
                self._communicator.Free()
        self._busy.clear()
