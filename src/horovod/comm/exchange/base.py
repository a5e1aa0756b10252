"""The contract of a transport for :class:`~horovod.comm.exchange.communicator.ExchangeCommunicator`, and the header of a
transfer.

The receiver of a transfer knows in advance to which kind of collective it belongs, the number of that collective, and how many
bytes follow. So it detects a peer that is out of step or sends other data. ``tcp`` sends these in a header; with ``mpi`` they
are in the tag and the length of a message.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Generic, Protocol, TypeAlias, TypeVar

from horovod.comm.base import Aborted


class CollectiveKind(IntEnum):
    """The kind of collective that a transfer belongs to; the values travel in headers and tags."""

    ALLREDUCE = 1
    ALLGATHER = 2
    BROADCAST = 3
    ALLTOALL = 4
    REDUCESCATTER = 5
    BARRIER = 6


HEADER = struct.Struct("<HHIQ")  # magic, CollectiveKind, number of the collective modulo 2**32, bytes that follow
MAGIC = 0x4876


class Flow(Protocol):
    """One direction of the traffic with one peer.

    Attributes:
        done: how much has moved so far, in the transport's own unit: bytes (tcp) or messages (mpi).
    """

    @property
    def done(self) -> int: ...


FlowT = TypeVar("FlowT", bound=Flow)

Mark: TypeAlias = tuple[FlowT, int]
"""A position in a flow. It is reached once the flow's ``done`` is at least this number."""


class PeerExchange(ABC, Generic[FlowT]):
    """All traffic between one rank of a group and every other rank.

    The thread that carries out a collective queues transfers in both directions, by reference, and then waits for some of them.
    While it waits, all queued transfers move, so all ranks may send first without a deadlock.
    """

    def __init__(self) -> None:
        self._number = 0
        self._collective = CollectiveKind.BARRIER
        self._aborted = False

    def begin(self, collective: CollectiveKind) -> None:
        """Start the next collective: every transfer queued from now on is part of it. All ranks call it in the same order.

        Raises:
            Aborted: :meth:`abort` was called.
        """
        self._check()
        self._collective = collective
        self._number = (self._number + 1) & 0xFFFFFFFF

    def _check(self) -> None:
        if self._aborted:
            raise Aborted("this communicator was aborted")

    def _header(self, buffers: Iterable[memoryview]) -> bytes:
        """The header of a transfer of these buffers in the present collective."""
        return HEADER.pack(MAGIC, self._collective, self._number, sum(buffer.nbytes for buffer in buffers))

    @abstractmethod
    def send(self, rank: int, *buffers: memoryview) -> Mark[FlowT]:
        """Queue one transfer to ``rank``. The buffers must not change until the returned mark is reached."""

    @abstractmethod
    def receive(self, rank: int, *buffers: memoryview) -> Mark[FlowT]:
        """Queue the receipt of one transfer from ``rank``. The buffers hold its data once the returned mark is reached."""

    @abstractmethod
    def wait(self, marks: Iterable[Mark[FlowT]]) -> None:
        """Move bytes until every one of ``marks`` is reached.

        Raises:
            PeerFailure: a peer is gone or out of step.
            Aborted: :meth:`abort` was called.
        """

    @abstractmethod
    def abort(self) -> None:
        """End the present wait and every later one with :class:`Aborted`. Any thread may call it, any number of times."""

    def may_still_read(self) -> bool:
        """As :meth:`horovod.comm.base.Communicator.may_still_read`."""
        return False

    def may_still_write(self) -> bool:
        """As :meth:`horovod.comm.base.Communicator.may_still_write`."""
        return False

    def descriptors(self) -> list[int]:
        """Open file descriptors, which a forked child must close."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Release connections and memory. Called once, when no collective runs."""


def mismatch(found: bytes, expected: bytes) -> str:
    """The text of an error for a header that is not the expected one."""
    magic, *meaning = HEADER.unpack(found)
    return out_of_step(meaning if magic == MAGIC else (), HEADER.unpack(expected)[1:])


def out_of_step(found: Sequence[int], expected: Sequence[int]) -> str:
    """The text of an error for a peer that sends part of another collective; both are kind, number and bytes."""
    if not found or found[0] not in tuple(CollectiveKind):
        return "it sent bytes that are not part of any collective"
    return f"it is out of step: it sent part of {described(*found)} where {described(*expected)} was due"


def described(collective: int, number: int, length: int) -> str:
    """A transfer of a collective as text, for errors."""
    return f"{CollectiveKind(collective).name.lower()} number {number} ({length} bytes)"
