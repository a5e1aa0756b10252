"""Simulated ranks for ``scale.py``: many members of one process set in a few processes, each on a socket pair.

Each is the real :class:`~horovod.core.worker.member.Member`, or a real client of the rendezvous. It computes nothing and moves
no tensors. Every member checks that it is told to run what it has announced, and nothing else.
"""

from __future__ import annotations

import hashlib
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from horovod.autotune.kept import Tuned
from horovod.comm.datatypes import DataType
from horovod.control.channel import Channel, ChannelClosed
from horovod.control.connection import Connection
from horovod.control.failure import Cause
from horovod.control.liveness_messages import Failure, decode
from horovod.control.liveness_monitor import LivenessMonitor
from horovod.control.liveness_tree import LivenessTree
from horovod.control.rendezvous.client import RendezvousClient
from horovod.core.negotiation import host_tally
from horovod.core.negotiation.messages import Decision, Operation, Request, TensorSpec
from horovod.core.negotiation.tree import Tree
from horovod.core.worker.connections import Connections
from horovod.core.worker.member import Member
from horovod.core.worker.relay import Relay
from horovod.core.worker.role import Schedule

LONGEST_SECONDS = 300.0
"""After so long without a message the simulation counts as stuck."""

Reports = list[tuple[int, float]]


class Step(NamedTuple):
    """What every rank does in one step.

    Attributes:
        requests: by rank and number of the step.
        messages: in how many announcements a rank submits them.
    """

    requests: Callable[[int, int], list[Request]]
    messages: int

    def parts(self, rank: int, step: int) -> list[list[Request]]:
        requests = self.requests(rank, step)
        length = -(-len(requests) // self.messages)
        return [requests[start : start + length] for start in range(0, len(requests), length)]


def resnet50() -> list[tuple[int, ...]]:
    """The shapes of ResNet-50's 161 parameters, in the order of its layers."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    width = 64
    for planes, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for out, into, kernel in ((planes, width, 1), (planes, planes, 3), (planes * 4, planes, 1)):
                shapes += [(out, into, kernel, kernel), (out,), (out,)]
            if block == 0:
                shapes += [(planes * 4, width, 1, 1), (planes * 4,), (planes * 4,)]
            width = planes * 4
    return [*shapes, (1000, 2048), (1000,)]


def gradients(messages: int = 1) -> Step:
    """A step of ResNet-50's gradients, the last layer first."""
    requests = [
        Request(
            Operation.ALLREDUCE,
            f"gradient.{index}",
            (TensorSpec(f"gradient.{index}", DataType.FLOAT32, shape),),
            caller="train.py:1",
        )
        for index, shape in reversed(list(enumerate(resnet50())))
    ]
    return Step(lambda rank, step: requests, messages)


def rows_from(sender: int, size: int, step: int) -> tuple[int, ...]:
    """How many rows one rank sends to each in an alltoall of the step."""
    return tuple(((sender * 7 + np.arange(size) * 3 + step * 5) % 97).tolist())


def rows_to(receiver: int, size: int, step: int) -> tuple[int, ...]:
    """How many rows one rank gets from each."""
    return tuple(((np.arange(size) * 7 + receiver * 3 + step * 5) % 97).tolist())


def alltoall(size: int) -> Step:
    """A step of one alltoall, whose splits change with the step."""

    def requests(rank: int, step: int) -> list[Request]:
        splits = rows_from(rank, size, step)
        spec = TensorSpec("tokens", DataType.FLOAT32, (sum(splits), 4))
        return [Request(Operation.ALLTOALL, "tokens", (spec,), splits=splits, caller="train.py:1")]

    return Step(requests, 1)


class SimulatedMember:
    """One rank but the first, which announces a step as soon as the one before it was ordered.

    Args:
        connections: with those with whom the tree connects it.
    """

    def __init__(
        self, rank: int, tree: Tree, connections: Mapping[int, socket.socket], what: Step, capacity: int
    ) -> None:
        self.connections = Connections({member: Channel(Connection(each)) for member, each in connections.items()})
        self.done = 0
        self.order = hashlib.sha256()
        self.seconds = 0.0
        self._rank = rank
        self._size = len(tree)
        self._what = what
        self._schedule = Schedule()
        self._role: Member
        if tree.children(rank):
            self._role = Relay(
                self.connections, self._schedule, capacity, tree.group(rank), range(len(tree)), LONGEST_SECONDS
            )
        else:
            self._role = Member(self.connections, self._schedule, None, capacity, tree.parent(rank))
        self._awaited: set[str] = set()

    def begin(self) -> None:
        """Announce the next step."""
        started = time.thread_time()
        for requests in self._what.parts(self._rank, self.done):
            self._awaited.update(request.name for request in requests)
            self._role.announce(requests)
        self._role.decide()
        self.connections.flush_all(LONGEST_SECONDS)
        self.seconds += time.thread_time() - started

    def serve(self, member: int) -> bool:
        """Take what has arrived from a member; whether that ends the step."""
        started = time.thread_time()
        for body in self.connections.receive(member):
            self._role.receive(member, body)
        self._role.decide()
        self.connections.flush_all(LONGEST_SECONDS)
        self.seconds += time.thread_time() - started
        while self._schedule.batches:
            batch = self._schedule.batches.popleft()
            assert not isinstance(batch, Tuned)
            for decision in batch:
                self._check(decision)
        if self._awaited:
            return False
        self.done += 1
        return True

    def _check(self, decision: Decision) -> None:
        if decision.error:
            raise RuntimeError(f"rank {self._rank}: {decision.error}")
        self._awaited.remove(decision.name)
        self.order.update(decision.name.encode())
        expected = rows_to(self._rank, self._size, self.done) if decision.operation is Operation.ALLTOALL else ()
        if tuple(decision.received) != expected:
            raise RuntimeError(f"rank {self._rank} was told wrong rows in step {self.done}")


def run_members(
    connections: Mapping[int, socket.socket], tree: Tree, what: Step, capacity: int, steps: int
) -> tuple[list[str], float]:
    """Drive members, and those that relays among them speak for, through all steps.

    Args:
        connections: with rank 0.

    Returns:
        The digests of the orders that they have followed, without repetition; the seconds that a relay works in a step.
    """
    host_tally.HELD_SECONDS = LONGEST_SECONDS  # the ranks of one host are late only as so many share a process
    ends: dict[int, dict[int, socket.socket]] = {}
    for rank, connection in connections.items():
        ends[rank] = {0: connection}
        for child in tree.children(rank):
            ends[rank][child], other = socket.socketpair()
            ends[child] = {rank: other}
    poll = select.poll()
    by_descriptor: dict[int, tuple[SimulatedMember, int]] = {}
    members = []
    for rank, own in ends.items():
        members.append(SimulatedMember(rank, tree, own, what, capacity))
        for member, connection in own.items():
            poll.register(connection, select.POLLIN)
            by_descriptor[connection.fileno()] = members[-1], member
    for each in members:
        each.begin()
    left = len(members)
    while left:
        found = poll.poll(LONGEST_SECONDS * 1000)
        if not found:
            raise TimeoutError("no order arrives")
        for descriptor, _ in found:
            served, member = by_descriptor[descriptor]
            if served.done == steps or not served.serve(member):
                continue
            if served.done < steps:
                served.begin()
            else:
                left -= 1
                for connection in ends[served._rank].values():
                    poll.unregister(connection)
    relays = [each.seconds / steps for each in members if tree.children(each._rank)]
    return sorted({member.order.hexdigest() for member in members}), max(relays, default=0.0)


def run_watched(connections: Mapping[int, socket.socket], tree: LivenessTree, lost: int) -> Reports:
    """Wait until every rank knows of a failure; rank ``lost``, if it is here, ends at once, as a killed process does.

    Relays have real liveness monitors; the others only listen.

    Args:
        connections: with rank 0. The ranks behind the relays among them are simulated here, too.

    Returns:
        The rank that each report names, and when (``time.monotonic``).
    """
    ends = {rank: {0: Channel(Connection(each))} for rank, each in connections.items()}
    for relay in list(ends):
        for rank in tree.ways(relay):
            one, other = socket.socketpair()
            ends[relay][rank] = Channel(Connection(one))
            ends.setdefault(rank, {})[relay] = Channel(Connection(other))
    reports: Reports = []
    relays, everybody = [], threading.Semaphore(0)

    def on_failure(rank: int, reason: str, cause: Cause) -> None:
        reports.append((rank, time.monotonic()))
        everybody.release()

    for rank, channels in ends.items():
        if tree.ways(rank) and rank != lost:
            monitor = LivenessMonitor(rank, tree, channels, 30, 0, str, lambda other: None, str, on_failure)
            monitor.start()
            relays.append(monitor)
    for channel in ends.get(lost, {}).values():
        channel.close()
    _listen({rank: channels for rank, channels in ends.items() if rank != lost and not tree.ways(rank)}, reports)
    for _ in relays:
        if not everybody.acquire(timeout=LONGEST_SECONDS):
            raise TimeoutError("not all relays know of the failure")
    for monitor in relays:
        monitor.leave()
    return reports


def _listen(ends: Mapping[int, Mapping[int, Channel]], reports: Reports) -> None:
    """Wait until each of these ranks learns of a failure on one of its connections."""
    poll = select.poll()
    by_descriptor = {channel.fileno(): (rank, channel) for rank, own in ends.items() for channel in own.values()}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    left = set(ends)
    while left:
        found = poll.poll(LONGEST_SECONDS * 1000)
        if not found:
            raise TimeoutError("not all ranks know of the failure")
        for descriptor, _ in found:
            rank, channel = by_descriptor[descriptor]
            try:
                messages = [decode(body) for body in channel.receive()]
            except ChannelClosed:  # a relay has left, or was the rank that is lost
                poll.unregister(descriptor)
                continue
            failure = next((each for each in messages if isinstance(each, Failure)), None)
            if failure is not None and rank in left:
                left.discard(rank)
                reports.append((failure.rank, time.monotonic()))


def run_clients(
    address: str, values: Mapping[int, bytes], size: int, arrived: Callable[[], None]
) -> list[tuple[int, float]]:
    """Exchange the ranks' values through the server, a thread for each rank.

    Args:
        arrived: called when all are connected; returns when all ranks of all processes are.

    Returns:
        By rank the bytes that it got, and when it had them all.
    """
    got: dict[int, tuple[int, float]] = {}
    clients = {rank: RendezvousClient(address, b"", LONGEST_SECONDS) for rank in values}

    def exchange(rank: int) -> None:
        found = clients[rank].exchange("init", rank, size, values[rank], LONGEST_SECONDS)
        got[rank] = sum(map(len, found)), time.monotonic()
        clients[rank].close()

    arrived()
    threads = [threading.Thread(target=exchange, args=(rank,), daemon=True) for rank in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONGEST_SECONDS)
    if got.keys() != values.keys():
        raise TimeoutError(f"{len(values) - len(got)} ranks have no answer")
    return list(got.values())
