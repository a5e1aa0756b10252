"""Bytes to and from all peers at once over MPI: the :class:`~horovod.comm.exchange.base.PeerExchange` of ``mpi``.

MPI carries, and Horovod reduces: results have the same bits as with Horovod's own engines, for every data type, and no
message is longer than :data:`CHUNK_BYTES`, so nothing is limited by what MPI's counts can hold. Messages go between
pairs of ranks, so a rank that does not come is known by name.

* A transfer has no header. The tag of its messages says what they are part of, and MPI says how long they are.
* A wait tests requests and sleeps a little between, longer and longer, so that it can be aborted; MPI can do neither.
  That also is what makes MPI's own progress.
* What lies in one place is sent from there and received there. When a wait fails, MPI takes back what was to be received, so
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
from horovod.comm.engine import EngineError
from horovod.comm.exchange.base import Mark, PeerExchange, described, out_of_step
from horovod.comm.mpi import runtime

CHUNK_BYTES = 8 << 20
"""The longest message. A peer that is waited for must end one in the time that a stall takes."""

WINDOW = 4
"""Messages that are under way at most in one direction between two ranks."""

_NUMBERS = 1 << 12
"""Numbers of collectives in a tag, which MPI guarantees 15 bits."""
_COLLECTIVES = 1 << 3
_TESTS = 8
"""Tests of each message in a row, before the wait looks at anything else."""
_LOOKS, _LOOKS_WITH_A_CORE = 6, 300
"""Such rows before a wait sleeps: about as long as a small message takes; a piece, where the rank has a core to itself."""
_SHORTEST_SLEEP = 20e-6
_LONGEST_SLEEP = 500e-6
_FREE_SECONDS = 5.0
"""How long the end of a communicator may wait for other ranks."""
_WITHDRAW_SECONDS = 2.0
"""How long to wait for what MPI has begun to receive when a wait fails."""

_log = logging.getLogger("horovod.comm")


class _Message(NamedTuple):
    """One that is posted.

    Attributes:
        data: what MPI reads or writes; a place in a tensor if there is one place, else memory of this module.
        places: where the data are from, or belong.
        tag: what it is part of.
    """

    request: Any
    data: memoryview
    places: Sequence[memoryview]
    tag: int


def _cut(buffers: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """What each message of a transfer consists of. There is at least one message. Both sides cut at the same bytes."""
    places: list[memoryview] = []
    room, cut = CHUNK_BYTES, False
    for buffer in buffers:
        while buffer.nbytes >= room:
            yield [*places, buffer[:room]]
            buffer = buffer[room:]
            places, room, cut = [], CHUNK_BYTES, True
        if buffer.nbytes:
            places.append(buffer)
            room -= buffer.nbytes
    if places or not cut:
        yield places


def _parts(data: memoryview, places: Sequence[memoryview]) -> Iterator[tuple[memoryview, memoryview]]:
    """The part of a message for each of its places; none where the only place is the message."""
    start = 0
    for place in places if len(places) > 1 else ():
        yield place, data[start : start + place.nbytes]
        start += place.nbytes


class _Flow:
    """One direction of the traffic with one peer.

    Attributes:
        queued, done: how many messages there have been, and how many of them are over.
        waiting: the messages that are not posted yet, each with its tag.
        status: what MPI says of a message that has come; None where nothing is received.
    """

    def __init__(self, peer: int, status: Any = None) -> None:
        self.peer = peer
        self.status = status
        self.queued = 0
        self.done = 0
        self.waiting: deque[tuple[list[memoryview], int]] = deque()
        self.active: deque[_Message] = deque()  # posted, in order
        self.free: list[memoryview] = []
        self.stamp = 0.0
        self.stalls = 0

    def append(self, buffers: Iterable[memoryview], tag: int) -> int:
        """Queue one transfer. Returns how many messages must be over when it is."""
        for places in _cut(buffers):
            self.waiting.append((places, tag))
            self.queued += 1
        return self.queued

    def memory_of(self, places: list[memoryview]) -> memoryview:
        """What MPI is to read or write for a message."""
        if len(places) == 1:
            return places[0]
        slot = self.free.pop() if self.free else np.empty(CHUNK_BYTES, np.uint8).data
        return slot[: sum(place.nbytes for place in places)]

    def finish(self) -> _Message:
        """The first message is over."""
        message = self.active.popleft()
        self.done += 1
        self.stamp, self.stalls = time.monotonic(), 0
        return message

    def release(self, message: _Message) -> None:
        """Its memory may serve another."""
        if len(message.places) != 1:
            self.free.append(memoryview(message.data.obj))  # the whole array that it is a part of


class MpiExchange(PeerExchange[_Flow]):
    """All messages of one rank of a group.

    Args:
        communicator: an mpi4py intracommunicator of the group, for this exchange alone. Owned from now on.
        stall_timeout: how long a peer that is waited for may end no message, before
        on_stall: is told.
        spins: the rank has a core to itself.
    """

    def __init__(
        self, communicator: Any, stall_timeout: timedelta, on_stall: OnStall = give_up, spins: bool = False
    ) -> None:
        super().__init__()
        self._mpi = mpi = runtime.started()
        self._communicator = communicator
        self._calls = runtime.calls()
        self._stall_timeout = stall_timeout.total_seconds()
        self._on_stall = on_stall
        self._looks = _LOOKS_WITH_A_CORE if spins else _LOOKS
        rank, size = communicator.Get_rank(), communicator.Get_size()
        peers = [peer for peer in range(size) if peer != rank]
        self._outgoing = {peer: _Flow(peer) for peer in peers}
        self._incoming = {peer: _Flow(peer, mpi.Status()) for peer in peers}
        self._busy: set[_Flow] = set()
        self._left = False  # a message that could not be taken back

    def send(self, rank: int, *buffers: memoryview) -> Mark[_Flow]:
        return self._queue(self._outgoing[rank], buffers)

    def receive(self, rank: int, *buffers: memoryview) -> Mark[_Flow]:
        return self._queue(self._incoming[rank], buffers)

    def _queue(self, flow: _Flow, buffers: Sequence[memoryview]) -> Mark[_Flow]:
        mark = flow.append(buffers, self._number % _NUMBERS * _COLLECTIVES + self._collective)
        try:
            self._check()  # nothing is posted after an abort
            self._post(flow)
        except BaseException:
            self._withdraw()
            raise
        return flow, mark

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
            ended = self._test()
            if ended is not None:
                self._finish(ended)
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

    def _test(self) -> _Flow | None:
        """Look a few times whether the first message of a flow is over. The flow where it is."""
        heads = [(flow, flow.active[0].request.Test) for flow in self._busy]
        with self._calls:
            for _ in range(_TESTS):
                for flow, test in heads:
                    try:
                        if test(flow.status):
                            return flow
                    except self._mpi.Exception as error:
                        raise self._failure(flow, error) from error
        return None

    def _finish(self, flow: _Flow) -> None:
        """Take note that a flow's first message is over, and post the next."""
        message = flow.finish()
        if flow.status is not None:
            self._arrived(flow, message)
        flow.release(message)
        self._post(flow)

    def _arrived(self, flow: _Flow, message: _Message) -> None:
        """Put what has come where it belongs, if it is what was due."""
        tag, length = flow.status.Get_tag(), flow.status.Get_count(self._mpi.BYTE)
        if (tag, length) != (message.tag, message.data.nbytes):
            raise PeerFailure(
                flow.peer, out_of_step((*_meaning(tag), length), (*_meaning(message.tag), message.data.nbytes))
            )
        for place, part in _parts(message.data, message.places):
            place[:] = part

    def _post(self, flow: _Flow) -> None:
        """Hand to MPI what may be under way."""
        while flow.waiting and len(flow.active) < WINDOW:
            places, tag = flow.waiting.popleft()
            data = flow.memory_of(places)
            with self._calls:
                try:
                    if flow.status is not None:
                        request = self._communicator.Irecv([data, self._mpi.BYTE], flow.peer, self._mpi.ANY_TAG)
                    else:
                        for place, part in _parts(data, places):
                            part[:] = place
                        request = self._communicator.Isend([data, self._mpi.BYTE], flow.peer, tag)
                except self._mpi.Exception as error:
                    raise self._failure(flow, error) from error
            flow.active.append(_Message(request, data, places, tag))
        if flow.active:
            self._busy.add(flow)
        else:
            self._busy.discard(flow)

    def _failure(self, flow: _Flow, error: Any) -> PeerFailure:
        if flow.status is not None and flow.active and error.Get_error_class() == self._mpi.ERR_TRUNCATE:
            due = flow.active[0]
            expected = described(*_meaning(due.tag), due.data.nbytes)
            return PeerFailure(flow.peer, f"it is out of step: it sent more bytes than were due, part of {expected}")
        return PeerFailure(flow.peer, f"MPI reports: {error.Get_error_string()}")

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
                self._busy.discard(flow)
        deadline = time.monotonic() + _WITHDRAW_SECONDS
        while True:
            with self._calls:
                left = [message for message in left if not self._ended(message)]
            if not left or time.monotonic() > deadline:
                break
            time.sleep(_LONGEST_SLEEP)  # as above
        if left:
            self._left = True
            runtime.abandoned.extend(left)
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

    def may_still_write(self) -> bool:
        return self._left

    def abort(self) -> None:
        self._aborted = True  # a wait looks every half a millisecond

    def close(self) -> None:
        if self._mpi.Is_finalized():
            return
        left = [message for flow in self._outgoing.values() for message in flow.active]
        runtime.abandoned.extend(left)
        if not left and not self._aborted:  # else others may be in the middle of something
            with suppress(EngineError):
                runtime.in_time(self._communicator.Free, time.monotonic() + _FREE_SECONDS, "freed a communicator")
        self._busy.clear()


def _meaning(tag: int) -> tuple[int, int]:
    """The collective, and its number, of which a message with this tag is a part."""
    return tag % _COLLECTIVES, tag // _COLLECTIVES
