"""How the members of a group exchange small messages before they have an engine: over their control connections, or over an
engine that they have for other memory. Called by :mod:`horovod.core.engines.engine_building`."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np

from horovod.comm.base import Communicator
from horovod.control.channel import LENGTH_BYTES, frame
from horovod.control.dial import receive_exactly

LONGEST_MESSAGE = 1 << 24


class MemberExchange(Protocol):
    """Small messages among the members of a group before they have an engine. All members make the same calls in one order.

    Attributes:
        ranks: the members' global ranks, for errors.
    """

    ranks: Sequence[int]

    def allgather(self, own: bytes) -> list[bytes]:
        """The bytes of all members, by index."""

    def broadcast(self, data: bytes, descriptor: int = -1) -> tuple[bytes, int]:
        """The bytes that the first member passes, and its descriptor: a duplicate for each member that can be passed one,
        else -1."""


class ExchangeOverConnections:
    """Over connections of the group's first member with each other member.

    Args:
        ranks: the members' global ranks, for errors.
        connections: by index; a member other than the first has only the one with the first.
        leads: whether this is the first member.
        deadline: ``time.monotonic`` by which a message must have arrived.

    Its methods raise TimeoutError or ConnectionError where a member does not answer; the message names its rank.
    """

    def __init__(
        self, ranks: Sequence[int], connections: Mapping[int, socket.socket], leads: bool, deadline: float
    ) -> None:
        self.ranks = ranks
        self._connections = connections
        self._leads = leads
        self._deadline = deadline

    def allgather(self, own: bytes) -> list[bytes]:
        if not self._leads:
            self._send(0, own)
            return msgspec.msgpack.decode(self._receive(0)[0], type=list[bytes])
        everything = [own if index == 0 else self._receive(index)[0] for index in range(len(self.ranks))]
        self.broadcast(msgspec.msgpack.encode(everything))
        return everything

    def broadcast(self, data: bytes, descriptor: int = -1) -> tuple[bytes, int]:
        if not self._leads:
            return self._receive(0)
        for index in self._connections:
            self._send(index, data, descriptor)
        return data, descriptor if descriptor < 0 else os.dup(descriptor)

    def _send(self, index: int, data: bytes, descriptor: int = -1) -> None:
        connection = self._connections[index]
        message = frame(data)
        try:
            connection.settimeout(max(0.001, self._deadline - time.monotonic()))
            if descriptor >= 0 and connection.family == socket.AF_UNIX:
                sent = socket.send_fds(connection, [message], [descriptor])
                message = message[sent:]
            connection.sendall(message)
        except OSError as error:
            raise self._lost(index, error) from error

    def _receive(self, index: int) -> tuple[bytes, int]:
        connection = self._connections[index]
        descriptors: list[int] = []
        head = b""
        try:
            if connection.family == socket.AF_UNIX:
                connection.settimeout(max(0.001, self._deadline - time.monotonic()))
                head, descriptors, _, _ = socket.recv_fds(connection, LENGTH_BYTES, 1)
                if not head:
                    raise ConnectionResetError("the connection was closed")
            head += receive_exactly(connection, LENGTH_BYTES - len(head), self._deadline)
            length = int.from_bytes(head, "big")
            if length > LONGEST_MESSAGE:
                raise ConnectionError(f"it announced a message of {length} bytes")
            return receive_exactly(connection, length, self._deadline), descriptors[0] if descriptors else -1
        except OSError as error:
            for received in descriptors:
                os.close(received)
            raise self._lost(index, error) from error

    def _lost(self, index: int, error: OSError) -> OSError:
        kind = TimeoutError if isinstance(error, TimeoutError) else ConnectionError
        return kind(
            f"rank {self.ranks[index]} did not take part in the choice of an engine ({error}). Look at its output"
        )


class ExchangeOverCommunicator:
    """Over the communicator for host memory of all ranks of the job; it passes no descriptors."""

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
