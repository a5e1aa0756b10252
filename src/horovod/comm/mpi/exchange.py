"""Bytes to and from all peers at once over MPI: the :class:`~horovod.comm.exchange.base.PeerExchange` of ``mpi``.

MPI moves bytes, and Horovod reduces. So results have the same bits as with Horovod's own engines, for every data type. No
message is longer than :data:`CHUNK_BYTES`, so MPI's 32-bit counts are no limit. Messages go between pairs of ranks, so a
wait knows which rank is missing.

* A transfer has no header. The tag of its messages identifies the collective, and MPI reports their length.
* A wait tests requests and sleeps between tests, longer each time, so that it can be aborted and does not keep its core busy.
  MPI's own waits allow neither. The tests also drive MPI's progress.
* Contiguous data is sent and received in place. When a wait fails, receives are cancelled, so that MPI writes into no tensor
  later. Sends cannot be cancelled (:meth:`MpiExchange.may_still_read`).
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
"""The longest message in bytes. A peer must complete one within the stall timeout."""

WINDOW = 4
"""The most messages in flight in one direction between two ranks."""

_NUMBERS = 1 << 12
"""How many numbers of collectives a tag distinguishes; MPI guarantees 15 bits for a tag."""
_COLLECTIVES = 1 << 3
"""How many kinds of collectives a tag distinguishes."""
_TESTS = 8
"""How often a wait tests each message before it checks for an abort."""
_LOOKS, _LOOKS_WITH_A_CORE = 6, 300
"""How many rounds of tests a wait makes before it sleeps: about as long as a small message takes or, if the rank has its own
core, a piece."""
_SHORTEST_SLEEP = 20e-6
_LONGEST_SLEEP = 500e-6
_FREE_SECONDS = 5.0
"""How long freeing a communicator may wait for other ranks."""
_WITHDRAW_SECONDS = 2.0
"""How long a rank waits, after a failure, for messages that MPI has begun to receive."""

_log = logging.getLogger("horovod.comm")


class _Message(NamedTuple):
    """A posted message.

    Attributes:
        request: mpi4py's request.
        data: the memory that MPI reads or writes: a tensor's if the message is contiguous there, else staging memory.
        buffers: the memory that the data comes from or goes to.
        tag: identifies the collective.
    """

    request: Any
    data: memoryview
    buffers: Sequence[memoryview]
    tag: int


def _cut(buffers: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Cut a transfer into messages, at least one. Both sides cut at the same bytes."""
    message: list[memoryview] = []
    room, cut = CHUNK_BYTES, False
    for buffer in buffers:
        while buffer.nbytes >= room:
            yield [*message, buffer[:room]]
            buffer = buffer[room:]
            message, room, cut = [], CHUNK_BYTES, True
        if buffer.nbytes:
            message.append(buffer)
            room -= buffer.nbytes
    if message or not cut:
        yield message


def _parts(data: memoryview, buffers: Sequence[memoryview]) -> Iterator[tuple[memoryview, memoryview]]:
    """The parts of a staged message, one for each of its buffers; none if the message is not staged."""
    start = 0
    for buffer in buffers if len(buffers) > 1 else ():
        yield buffer, data[start : start + buffer.nbytes]
        start += buffer.nbytes


class _Flow:
    """One direction of the traffic with one peer.

    Args:
        peer: the index of the peer in the group.
        status: MPI's status of a received message; None in a flow that sends.

    Attributes:
        queued, done: how many messages were queued, and how many of them are complete.
        waiting: the messages that are not posted yet, each with its tag.
        active: the posted messages, in order.
        free: staging memory to use again.
        stamp: when a message was last completed, a wait for the flow began, or its stall was reported.
        stalls: how many stalls were reported since a message was last completed or the wait began.
    """

    def __init__(self, peer: int, status: Any = None) -> None:
        self.peer = peer
        self.status = status
        self.queued = 0
        self.done = 0
        self.waiting: deque[tuple[list[memoryview], int]] = deque()
        self.active: deque[_Message] = deque()
        self.free: list[memoryview] = []
        self.stamp = 0.0
        self.stalls = 0

    def append(self, buffers: Iterable[memoryview], tag: int) -> int:
        """Queue one transfer. Returns the value of ``done`` at which the transfer is complete."""
        for message in _cut(buffers):
            self.waiting.append((message, tag))
            self.queued += 1
        return self.queued

    def memory_of(self, buffers: list[memoryview]) -> memoryview:
        """The memory that MPI reads or writes for a message."""
        if len(buffers) == 1:
            return buffers[0]
        slot = self.free.pop() if self.free else np.empty(CHUNK_BYTES, np.uint8).data
        return slot[: sum(buffer.nbytes for buffer in buffers)]

    def finish(self) -> _Message:
        """Record that the first posted message is complete, and return it."""
        message = self.active.popleft()
        self.done += 1
        self.stamp, self.stalls = time.monotonic(), 0
        return message

    def release(self, message: _Message) -> None:
        """Let other messages use the staging memory of a complete one."""
        if len(message.buffers) != 1:
            self.free.append(memoryview(message.data.obj))  # the whole array of which the message has used a part


class MpiExchange(PeerExchange[_Flow]):
    """All messages of one rank of a group.

    Args:
        communicator: an mpi4py intracommunicator of the group, for this exchange alone, which owns it from now on.
        stall_timeout: how long a peer may complete no message while this rank waits for it.
        on_stall: called when a peer has completed no message for ``stall_timeout``.
        spins: whether this rank has a core to itself, and so may poll for a while before it sleeps.
    """

    def __init__(
        self, communicator: Any, stall_timeout: timedelta, on_stall: OnStall = give_up, spins: bool = False
    ) -> None:
        super().__init__()
        self._mpi = mpi = runtime.initialised_mpi()
        self._communicator = communicator
        self._calls = runtime.call_lock()
        self._stall_timeout = stall_timeout.total_seconds()
        self._on_stall = on_stall
        self._looks = _LOOKS_WITH_A_CORE if spins else _LOOKS
        rank, size = communicator.Get_rank(), communicator.Get_size()
        peers = [peer for peer in range(size) if peer != rank]
        self._outgoing = {peer: _Flow(peer) for peer in peers}
        self._incoming = {peer: _Flow(peer, mpi.Status()) for peer in peers}
        self._busy: set[_Flow] = set()
        self._left = False  # whether MPI may still write into a tensor, since a receive could not be cancelled

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
            time.sleep(sleep)  # an abort cannot end MPI's own waits
            sleep = min(2 * sleep, _LONGEST_SLEEP)
            now = time.monotonic()
            silent = min((flow for flow, _ in missing), key=lambda flow: flow.stamp)
            if now - silent.stamp >= self._stall_timeout:
                silent.stamp, silent.stalls = now, silent.stalls + 1
                self._on_stall(Stall(silent.peer, silent.stalls * self._stall_timeout, silent.stalls))

    def _test(self) -> _Flow | None:
        """Test the first message of each flow a few times. Returns a flow whose first message is complete, or None."""
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
        """Complete a flow's first message, and post the next."""
        message = flow.finish()
        if flow.status is not None:
            self._arrived(flow, message)
        flow.release(message)
        self._post(flow)

    def _arrived(self, flow: _Flow, message: _Message) -> None:
        """Check a received message, and copy it to its buffers."""
        tag, length = flow.status.Get_tag(), flow.status.Get_count(self._mpi.BYTE)
        if (tag, length) != (message.tag, message.data.nbytes):
            raise PeerFailure(
                flow.peer, out_of_step((*_meaning(tag), length), (*_meaning(message.tag), message.data.nbytes))
            )
        for buffer, part in _parts(message.data, message.buffers):
            buffer[:] = part

    def _post(self, flow: _Flow) -> None:
        """Post waiting messages, as many as may be in flight."""
        while flow.waiting and len(flow.active) < WINDOW:
            buffers, tag = flow.waiting.popleft()
            data = flow.memory_of(buffers)
            with self._calls:
                try:
                    if flow.status is not None:
                        request = self._communicator.Irecv([data, self._mpi.BYTE], flow.peer, self._mpi.ANY_TAG)
                    else:
                        for buffer, part in _parts(data, buffers):
                            part[:] = buffer
                        request = self._communicator.Isend([data, self._mpi.BYTE], flow.peer, tag)
                except self._mpi.Exception as error:
                    raise self._failure(flow, error) from error
            flow.active.append(_Message(request, data, buffers, tag))
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
        """After a failure: cancel receives, so that MPI writes into no tensor any more."""
        left: list[_Message] = []
        with self._calls:
            for flow in self._incoming.values():
                for message in flow.active:
                    with suppress(self._mpi.Exception):  # the receive is already over, with an error
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
            time.sleep(_LONGEST_SLEEP)  # MPI has no wait with a time limit
        if left:
            self._left = True
            runtime.abandoned.extend(left)
            _log.error(
                "rank %d of the group: MPI has not ended receives that could not be cancelled; it may still write into tensors "
                "of collectives that have failed, so end this process instead of using them again",
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
        self._aborted = True  # a wait checks this at least every half millisecond

    def close(self) -> None:
        if self._mpi.Is_finalized():
            return
        left = [message for flow in self._outgoing.values() for message in flow.active]
        runtime.abandoned.extend(left)
        if not left and not self._aborted:  # otherwise freeing would wait for other ranks, which may still communicate
            with suppress(EngineError):
                runtime.in_time(self._communicator.Free, time.monotonic() + _FREE_SECONDS, "freed a communicator")
        self._busy.clear()


def _meaning(tag: int) -> tuple[int, int]:
    """The kind of collective in a tag, and the collective's number modulo :data:`_NUMBERS`."""
    return tag % _COLLECTIVES, tag // _COLLECTIVES
