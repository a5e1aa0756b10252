"""Worker threads of several ranks inside this one process, and a test's means to look at them and to play their peers."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from engines import make_group, proposals_of
from horovod._base.config import Config
from horovod.comm.base import Communicator
from horovod.comm.datatypes import Array, DataType
from horovod.comm.reduction import ReduceOp
from horovod.comm.shm.proposals import Proposals
from horovod.comm.single import SingleCommunicator
from horovod.comm.tuned import TunedSettings
from horovod.control.channel import Channel
from horovod.control.connection import Connection
from horovod.control.failure import LOST, Cause
from horovod.core.errors import HorovodInternalError
from horovod.core.negotiation.messages import (
    Announce,
    Operation,
    Order,
    Request,
    TensorSpec,
    decode_from_coordinator,
    decode_from_member,
    encode,
)
from horovod.core.requests.batch import Entry
from horovod.core.requests.handle import Handle
from horovod.core.worker.cpu_affinity import CpuPlacement
from horovod.core.worker.driving_threads import QUICK_BYTES
from horovod.core.worker.waiting import WorkerState
from horovod.core.worker.worker import WorkerThread
from time_limits import SOON
from unit.control.concurrent_ranks import wait_until

SECONDS = SOON

MEDIUM = 20_000
"""Elements of an array too large for the fast path, and small enough for a waiting thread."""

LARGE = QUICK_BYTES // 4 + 1
"""Elements of an array that only a worker thread reduces."""


class Watch:
    """Notes what a worker thread tells the liveness monitor."""

    def __init__(self) -> None:
        self.call_sites: dict[int, str] = {}
        self.thread_lines: dict[int, list[str]] = {}
        self.awaited: dict[int, list[str]] = {}
        self.dumps: list[tuple[str, str]] = []
        self.reports: list[tuple[int, str, bool]] = []
        self.complaints: list[tuple[int, str, int]] = []
        self.probes = 0

    def report(self, rank: int, reason: str, suspected: bool = False, cause: Cause = LOST) -> None:
        self.reports.append((rank, reason, suspected))

    def report_no_progress(self, rank: int, reason: str, times: int) -> None:
        self.complaints.append((rank, reason, times))

    def probe(self) -> None:
        self.probes += 1

    def request_dump(self, why: str, reason: str) -> None:
        self.dumps.append((why, reason))

    def disagreed(self, reason: str) -> None:
        self.dumps.append(("mismatch", reason))


class Noting(Communicator):
    """Wraps an engine: notes what is called, and lets a test step in before each collective."""

    name = "noting"

    def __init__(self, engine: Communicator) -> None:
        super().__init__(engine.rank, engine.size)
        self._engine = engine
        self.batches: list[int] = []
        self.before: Callable[[], None] = lambda: None
        self.aborts = 0

    def allreduce(self, inputs: Sequence[Array], *rest: Any) -> None:
        self.batches.append(len(inputs))
        self.before()
        self._engine.allreduce(inputs, *rest)

    def tune(self, settings: TunedSettings) -> None:
        self._engine.tune(settings)

    def allgather(self, inputs: Sequence[Array], *rest: Any) -> None:
        self.batches.append(len(inputs))
        self.before()
        self._engine.allgather(inputs, *rest)

    def broadcast(self, *arguments: Any) -> None:
        self.before()
        self._engine.broadcast(*arguments)

    def alltoall(self, *arguments: Any) -> None:
        self.before()
        self._engine.alltoall(*arguments)

    def reducescatter(self, *arguments: Any) -> None:
        self.before()
        self._engine.reducescatter(*arguments)

    def barrier(self) -> None:
        self.before()
        self._engine.barrier()

    def abort(self) -> None:
        self.aborts += 1
        self._engine.abort()

    def close(self) -> None:
        self._engine.close()


class Rank:
    """One rank's worker thread with its surroundings."""

    def __init__(
        self, worker: WorkerThread, communicator: Noting, watch: Watch, stopped: list[tuple[int, str, bool]]
    ) -> None:
        self.worker = worker
        self.communicator = communicator
        self.watch = watch
        self.stopped = stopped

    def submit(
        self,
        request: Request,
        *arrays: Array,
        allocate: Callable[[int, int], Array] | None = None,
        awaited: bool = False,
        outputs: Sequence[Array] | None = None,
    ) -> Handle:
        handle = Handle()
        flat = [array.reshape(-1) for array in arrays]
        targets = flat if outputs is None else outputs
        self.worker.submit(Entry(request, flat, targets, allocate, handle, time.monotonic()), awaited=awaited)
        return handle

    def allreduce(self, name: str, array: Array, op: ReduceOp = ReduceOp.SUM, **fields: Any) -> Handle:
        return self.submit(allreduce_request(name, array.shape, op, **fields), array)


def allreduce_request(name: str, shape: tuple[int, ...] = (1,), op: ReduceOp = ReduceOp.SUM, **fields: Any) -> Request:
    return Request(Operation.ALLREDUCE, name, (TensorSpec(name, DataType.FLOAT32, shape),), op, **fields)


JOIN = Request(Operation.JOIN, "join.noname", transient=True)


def ones(number: float = 1.0, length: int = 4) -> Array:
    return np.full(length, number, np.float32)


class Set:
    """A process set, every rank of which lives here; or some of its ranks, the test playing the others."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def worker(
        self,
        ranks: Sequence[int],
        index: int,
        connections: dict[int, socket.socket],
        communicator: Communicator,
        config: Config,
        proposals: Proposals | None = None,
        placement: CpuPlacement | None = None,
    ) -> Rank:
        watch, stopped, noting = Watch(), [], Noting(communicator)
        channels = {member: Channel(Connection(connection)) for member, connection in connections.items()}

        def on_stopped(rank: int, reason: str, interrupted: bool) -> None:
            stopped.append((rank, reason, interrupted))

        if placement is None:
            placement = CpuPlacement(spins=len(ranks) <= len(os.sched_getaffinity(0)))  # all ranks are in this process
        worker = WorkerThread(
            f"test-{index}", ranks, index, channels, noting, config, watch, on_stopped, placement, proposals
        )
        self._stack.callback(self._end, worker)
        return Rank(worker, noting, watch, stopped)

    @staticmethod
    def _end(worker: WorkerThread) -> None:
        worker.abort(HorovodInternalError("the test is over"))
        assert worker.join(SOON)
        worker.close()

    def whole(
        self,
        size: int,
        engine: str = "shm",
        ranks: Sequence[int] | None = None,
        start: bool = True,
        proposals: bool = False,
        contributions: bool = True,
        **settings: Any,
    ) -> list[Rank]:
        ranks = ranks or range(size)
        pairs = {member: socket.socketpair() for member in range(1, size)}
        group = make_group("single" if size == 1 else engine, size, timedelta(seconds=SECONDS))
        links = [{member: pair[0] for member, pair in pairs.items()}]
        links += [{0: pairs[member][1]} for member in range(1, size)]
        config = Config(**settings)
        fast_paths = self.proposals_of(size, contributions) if proposals else [None] * size
        made = [
            self.worker(ranks, index, links[index], group[index], config, fast_paths[index]) for index in range(size)
        ]
        if start:
            for rank in made:
                rank.worker.start()
        return made

    def proposals_of(self, size: int, contributions: bool = True) -> list[Proposals]:
        """The proposals of all ranks, all in this process."""
        made = proposals_of(size, contributions)
        for proposals in made:
            self._stack.callback(proposals.close)
        return made

    def part(
        self,
        index: int,
        size: int,
        start: bool = True,
        proposals: Proposals | None = None,
        placement: CpuPlacement | None = None,
        send_buffer: int = 0,
        **settings: Any,
    ) -> tuple[Rank, dict[int, Peer]]:
        """One worker thread, with an engine that needs no peers; the test speaks for the others.

        Args:
            send_buffer: bytes that each of its sockets holds; 0: what the kernel gives.
        """
        others = range(1, size) if index == 0 else [0]
        pairs = {member: socket.socketpair() for member in others}
        links = {member: pair[0] for member, pair in pairs.items()}
        if send_buffer:
            for link in links.values():
                link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        rank = self.worker(range(size), index, links, SingleCommunicator(), Config(**settings), proposals, placement)
        peers = {member: Peer(pair[1]) for member, pair in pairs.items()}
        for peer in peers.values():
            self._stack.callback(peer.channel.close)
        if start:
            rank.worker.start()
        return rank, peers

    def close(self) -> None:
        self._stack.close()


class Peer:
    """The far end of a worker thread's channel."""

    def __init__(self, connection: socket.socket) -> None:
        self.channel = Channel(Connection(connection))
        self._inbox: list[bytes] = []

    def say(self, message: Any) -> None:
        self.channel.send(encode(message))

    def hear(self) -> bytes:
        def arrived() -> bool:
            if not self._inbox:
                self._inbox += self.channel.receive()
            return bool(self._inbox)

        wait_until(arrived, "a message")
        return self._inbox.pop(0)

    def ordered(self) -> list[list[Any]]:
        """The batches of the next order."""
        order = decode_from_coordinator(self.hear())
        assert isinstance(order, Order)
        return order.batches

    def ordered_by_now(self) -> list[list[Any]]:
        """The batches of all orders that have arrived as a whole."""
        orders = [decode_from_coordinator(body) for body in self.channel.receive()]
        assert all(isinstance(order, Order) for order in orders)
        return [batch for order in orders if isinstance(order, Order) for batch in order.batches]

    def announced(self) -> list[Any]:
        message = decode_from_member(self.hear())
        assert isinstance(message, Announce)
        return message.items


def wait(*handles: Handle) -> None:
    for handle in handles:
        handle.wait(SECONDS)


def error_of(handle: Handle) -> str:
    with pytest.raises(HorovodInternalError) as caught:
        handle.wait(SECONDS)
    return str(caught.value)


def on_every_rank(ranks: Sequence[Rank], function: Callable[[Rank], None]) -> None:
    """Run ``function`` in a thread of its own for each rank."""
    failed: list[BaseException] = []

    def run(rank: Rank) -> None:
        try:
            function(rank)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(rank,), name=f"script-{rank.worker.index}") for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    if failed:
        raise failed[0]


def abort_when_reported(ranks: Sequence[Rank], text: str) -> threading.Thread:
    """Play the liveness monitor: when the first of these ranks has reported a failure, all fail with ``text``. To be joined."""

    def failure() -> None:
        wait_until(lambda: ranks[0].watch.reports, "the report")
        for rank in ranks:
            rank.worker.abort(HorovodInternalError(text))

    thread = threading.Thread(target=failure)
    thread.start()
    return thread


def asleep(ranks: Sequence[Rank]) -> Sequence[Rank]:
    """The same ranks, when their worker threads sleep."""
    for rank in ranks:
        wait_until(lambda worker=rank.worker: is_asleep(worker), "a worker thread that sleeps")
    return ranks


def is_asleep(worker: WorkerThread) -> bool:
    """Whether the worker thread sleeps until something wakes it."""
    return worker._requests._state is WorkerState.ASLEEP


def await_decision(coordinator: Rank, members: int) -> Callable[[], None]:
    """Returns a function that waits until all members have announced the next request. Call it before they submit."""
    timeline = NotingTimeline()
    coordinator.worker.role.observer.timeline = timeline
    return lambda: wait_until(lambda: timeline.calls.count("ready") >= members, "the decision")


class NotingTimeline:
    """Stands in for the timeline: notes the names of the methods that a coordinator calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: self.calls.append(name)


def threads_of(rank: Rank) -> list[str]:
    """The names of the threads that run this rank's collectives, one after another."""
    names: list[str] = []
    rank.communicator.before = lambda: names.append(threading.current_thread().name)
    return names


def hold(rank: Rank) -> tuple[threading.Event, threading.Event]:
    """Make the rank's next collective wait; returns "it has begun" and "go on"."""
    begun, go_on = threading.Event(), threading.Event()

    def before() -> None:
        begun.set()
        assert go_on.wait(SECONDS)

    rank.communicator.before = before
    return begun, go_on


def in_thread(function: Callable[[], None]) -> threading.Thread:
    """Run it beside the test; to be joined."""
    thread = threading.Thread(target=function)
    thread.start()
    return thread
