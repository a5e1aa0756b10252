"""How the members of a group exchange small messages before they have an engine: over their control connections, or over an
engine that they have for other memory. Called by :mod:`horovod.core.engines.engine_building`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np

from horovod.comm.base import Communicator
from horovod.control.connection import Connection
from horovod.control.lost_rank import LostRankError, text_of_loss
from horovod.core.negotiation.tree import COORDINATOR, Tree

LONGEST_MESSAGE = 1 << 24

_DATA, _FAILED = b"d", b"f"
"""How a message begins: with data, or with the error of a member that has not heard from another one."""
_PASSING_ON_SECONDS = 1.0
"""The time by which a member waits longer than its parent in the tree, because the parent knows better which rank is
missing."""


class LostMemberError(LostRankError, ConnectionError):
    """A member was lost while the members exchanged messages."""


class LateMemberError(LostRankError, TimeoutError):
    """A member has not answered in time."""


class MemberExchange(Protocol):
    """Small messages among the members of a group before they have an engine. All members make the same calls in one order.

    Attributes:
        ranks: the members' global ranks, for errors.
    """

    ranks: Sequence[int]

    def allgather(self, own: bytes) -> list[bytes]:
        """The bytes of all members, by index."""

    def broadcast(self, data: bytes, descriptor: int = -1) -> tuple[bytes, int]:
        """The first member's bytes and a duplicate of its descriptor; -1 on members that cannot be passed a descriptor."""


class ExchangeOverConnections:
    """An exchange over the connections of a tree.

    Args:
        ranks: the members' global ranks, for errors.
        connections: the connections to this member's neighbours in the tree, by index.
        index: the index of this member.
        deadline: ``time.monotonic`` by which a message must have arrived.
        tree: None: the first member is connected to every other member.

    Its methods raise LateMemberError or LostMemberError if a member does not answer; the message names its rank. Members that
    wait for that rank through this one get the same message.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        connections: Mapping[int, Connection],
        index: int,
        deadline: float,
        tree: Tree | None = None,
    ) -> None:
        tree = tree or Tree.flat(len(ranks))
        self.ranks = ranks
        self._connections = connections
        self._index = index
        self._parent = tree.parent(index)
        self._children = tree.children(index)
        self._groups = {child: tree.group(child) for child in self._children}
        self._deadline = deadline

    def allgather(self, own: bytes) -> list[bytes]:
        values = {self._index: own}
        try:
            for child in self._children:
                found = msgspec.msgpack.decode(self._receive(child)[0], type=list[bytes])
                values.update(zip(self._groups[child], found, strict=True))
            body = msgspec.msgpack.encode([values[index] for index in sorted(values)])
            if self._index != COORDINATOR:
                self._send_to_parent(_DATA + body)
        except OSError as error:
            self._pass_on(error, self._connections)
            raise
        return msgspec.msgpack.decode(self.broadcast(body)[0], type=list[bytes])

    def broadcast(self, data: bytes, descriptor: int = -1) -> tuple[bytes, int]:
        if self._index != COORDINATOR:
            try:
                data, descriptor = self._receive(self._parent)
            except OSError as error:
                self._pass_on(error, self._children)
                raise
        elif descriptor >= 0:
            descriptor = os.dup(descriptor)
        for position, child in enumerate(self._children, 1):
            try:
                self._send(child, _DATA + data, descriptor)
            except OSError as error:
                self._pass_on(error, self._children[position:])
                if descriptor >= 0:
                    os.close(descriptor)
                raise
        return data, descriptor

    def _send_to_parent(self, data: bytes) -> None:
        try:
            self._send(self._parent, data)
        except ConnectionError:
            self._receive(self._parent)  # a parent that gives up sends the reason before it closes the connection
            raise

    def _send(self, index: int, data: bytes, descriptor: int = -1) -> None:
        try:
            self._connections[index].send(data, self._deadline, descriptor)
        except OSError as error:
            raise self._lost(index, error) from error

    def _pass_on(self, error: OSError, waiting: Iterable[int]) -> None:
        """Send the reason of a failure to the members that wait for this one."""
        lost = error.lost_rank if isinstance(error, LostRankError) else -1
        message = _FAILED + msgspec.msgpack.encode((lost, str(error)))
        for index in waiting:
            try:
                self._connections[index].send(message, time.monotonic() + _PASSING_ON_SECONDS)
            except OSError:
                continue  # it is the lost one, or has ended, too

    def _receive(self, index: int) -> tuple[bytes, int]:
        deadline = self._deadline
        if index == self._parent and self._index != COORDINATOR:
            deadline += _PASSING_ON_SECONDS * (1 if index == COORDINATOR else 2)
        try:
            body, descriptor = self._connections[index].receive(LONGEST_MESSAGE, deadline)
        except OSError as error:
            raise self._lost(index, error) from error
        if not body.startswith(_DATA):
            if descriptor >= 0:
                os.close(descriptor)
            lost, text = msgspec.msgpack.decode(body.removeprefix(_FAILED), type=tuple[int, str])
            failure = LostMemberError(text)
            failure.lost_rank = lost
            raise failure
        return body[len(_DATA) :], descriptor

    def _lost(self, index: int, error: OSError) -> OSError:
        rank = self.ranks[index]
        kind = LateMemberError if isinstance(error, TimeoutError) else LostMemberError
        lost = kind(text_of_loss(rank, "the ranks chose an engine", f"{error}. Look at its output"))
        lost.lost_rank = rank
        return lost


class ExchangeOverCommunicator:
    """An exchange over the communicator of all ranks for host memory. It passes no descriptors."""

    def __init__(self, communicator: Communicator) -> None:
        self.ranks: Sequence[int] = range(communicator.size)
        self._communicator = communicator

    def allgather(self, own: bytes) -> list[bytes]:
        size = self._communicator.size
        lengths = np.empty(size, np.int64)
        self._communicator.allgather([np.array([len(own)], np.int64)], [lengths], [[1] * size])
        everything = np.empty(int(lengths.sum()), np.uint8)
        self._communicator.allgather([np.frombuffer(own, np.uint8)], [everything], [lengths.tolist()])
        ends = lengths.cumsum().tolist()
        return [everything[end - length : end].tobytes() for end, length in zip(ends, lengths.tolist(), strict=True)]

    def broadcast(self, data: bytes, descriptor: int = -1) -> tuple[bytes, int]:
        length = np.array([len(data)], np.int64)
        self._communicator.broadcast([length], 0)
        array = np.empty(int(length[0]), np.uint8)
        if self._communicator.rank == 0:
            array[:] = np.frombuffer(data, np.uint8)
        self._communicator.broadcast([array], 0)
        return array.tobytes(), -1
