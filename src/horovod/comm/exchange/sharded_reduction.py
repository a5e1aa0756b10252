"""A reduction streamed over a ``PeerExchange``: how ``comm.exchange.communicator`` carries out allreduce and reducescatter.

Every rank owns one part of the batch. In round k each rank sends piece k of every other rank's part to its owner. The owner
reduces the contributions to piece k and, for an allreduce, sends the result to all other ranks. Between any two
ranks the order of the transfers is: contributions 0, contributions 1, results 0, contributions 2, results 1, ... So the next
piece travels while one is reduced.

What a piece consists of, and how it is reduced, is up to its :class:`PieceSource`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

from horovod.comm.exchange.base import Mark, PeerExchange

Buffers: TypeAlias = Sequence[memoryview]
"""The memory of one transfer; empty for none."""


class PieceSource(ABC):
    """The pieces of one reduction, as one rank sees them.

    Contributions and results of round k and round k + 2 may use the same staging memory, which so depends on the size of pieces
    and not on the size of the batch.

    Attributes:
        rounds: how many pieces the longest part has.
        has_results: whether results are sent to all ranks; otherwise they stay with their owners.
    """

    rounds: int
    has_results: bool

    @abstractmethod
    def contribution(self, rank: int, index: int) -> Buffers:
        """This rank's contribution to piece ``index`` of another rank's part; empty past the last piece."""

    @abstractmethod
    def room(self, rank: int, index: int) -> Buffers:
        """Memory for another rank's contribution to piece ``index`` of this rank's part; empty past the last piece."""

    @abstractmethod
    def reduce(self, index: int) -> Buffers:
        """Reduce piece ``index`` of this rank's part, for which all contributions have arrived. Returns what to send of the
        result; empty past the last piece."""

    @abstractmethod
    def result_room(self, rank: int, index: int) -> Buffers:
        """Memory for the result of piece ``index`` of another rank's part; empty past the last piece.

        It may be the memory of the input from which the result was reduced, because the owner has received that input by then.
        """

    @abstractmethod
    def unpack(self, rank: int, index: int) -> None:
        """Write this result, which has arrived, where it belongs."""


class ShardedReduction:
    """One streamed reduction. Every rank of the group makes its own with matching pieces, and calls :meth:`run` once.

    Args:
        exchange: the transport to every other rank.
        rank, size: this rank's index in the group, and the size of the group.
        pieces: what is reduced.
    """

    def __init__(self, exchange: PeerExchange[Any], rank: int, size: int, pieces: PieceSource) -> None:
        self._exchange = exchange
        # Start with the next rank, so that not every rank sends to rank 0 first.
        self._peers = [(rank + distance) % size for distance in range(1, size)]
        self._pieces = pieces
        self._sent: deque[list[Mark[Any]]] = deque([[], []])  # the transfers that the last two rounds have sent
        self._results: deque[tuple[list[Mark[Any]], list[int], int]] = deque()  # arriving, not yet unpacked

    def run(self) -> None:
        """Carry out the reduction.

        Raises:
            PeerFailure, Aborted: as :meth:`~horovod.comm.exchange.base.PeerExchange.wait`.
        """
        contributions = self._send_contributions(0)
        for index in range(self._pieces.rounds):
            arrived = contributions
            contributions = self._send_contributions(index + 1)
            self._exchange.wait(arrived)
            if len(self._results) == 2:
                self._unpack()
            self._reduce(index)
            if self._pieces.has_results:
                self._collect(index)
        while self._results:
            self._unpack()
        for marks in self._sent:
            self._exchange.wait(marks)

    def _send_contributions(self, index: int) -> list[Mark[Any]]:
        """Send piece ``index`` of each part to its owner, and queue the receipt of the contributions to this rank's own part.
        Does nothing past the last piece."""
        self._exchange.wait(self._sent.popleft())
        sent, expected = [], []
        for r in self._peers:
            buffers = self._pieces.contribution(r, index)
            if buffers:
                sent.append(self._exchange.send(r, *buffers))
        self._sent.append(sent)
        for r in self._peers:
            buffers = self._pieces.room(r, index)
            if buffers:
                expected.append(self._exchange.receive(r, *buffers))
        return expected

    def _reduce(self, index: int) -> None:
        """Reduce piece ``index`` of this rank's own part, and send the result to all other ranks."""
        buffers = self._pieces.reduce(index)
        if buffers and self._pieces.has_results:
            self._sent[-1] += [self._exchange.send(r, *buffers) for r in self._peers]

    def _collect(self, index: int) -> None:
        """Queue the receipt of piece ``index`` of every other rank's result."""
        marks, ranks = [], []
        for r in self._peers:
            buffers = self._pieces.result_room(r, index)
            if buffers:
                marks.append(self._exchange.receive(r, *buffers))
                ranks.append(r)
        self._results.append((marks, ranks, index))

    def _unpack(self) -> None:
        """Wait for the oldest pending results and write them to the outputs."""
        marks, ranks, index = self._results.popleft()
        self._exchange.wait(marks)
        for r in ranks:
            self._pieces.unpack(r, index)
