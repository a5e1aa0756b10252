"""A reduction streamed over a ``PeerExchange``: how ``comm.exchange.communicator`` carries out allreduce and reducescatter.

Every rank owns one part of the batch. In round k each rank sends piece k of every other rank's part to its owner. The owner
reduces the contributions to piece k and, for an allreduce, sends the result to all other ranks. Between any two
ranks the order of the transfers is: contributions 0, contributions 1, results 0, contributions 2, results 1, ... So the next
piece travels while one is reduced.

The staging memory depends on the size of pieces, not on the size of the batch. Data that is contiguous in the caller's
arrays is sent from there and received there. Other data passes through staging memory; round k and round k + 2 use the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from horovod.comm.datatypes import Array
from horovod.comm.exchange.base import Mark, PeerExchange
from horovod.comm.exchange.staging import Staging, as_bytes
from horovod.comm.ranges import Range


class ShardedReduction:
    """One streamed reduction. Every rank of the group makes its own with matching parts, and calls :meth:`run` once.

    Args:
        exchange: the transport to every other rank.
        staging: memory for data that is not contiguous.
        rank: this rank's index in the group.
        dtype: of all elements.
        step: how many elements a piece has; the last piece of a part may have fewer.
        inputs: by rank, the part of this rank's input that the rank owns; the lengths are the same on all ranks.
        target: receives the result of this rank's own part; as long as ``inputs[rank]``.
        outputs: by rank, receives the result of the part that the rank owns; empty if results stay with their owners.
        combine: ``combine(target, contributions)`` reduces contributions, by rank, as ``reduction.reduce_into``.
    """

    def __init__(
        self,
        exchange: PeerExchange[Any],
        staging: Staging,
        rank: int,
        dtype: np.dtype[Any],
        step: int,
        inputs: Sequence[Range],
        target: Range,
        outputs: Sequence[Range],
        combine: Callable[[Array, Sequence[Array]], None],
    ) -> None:
        self._exchange = exchange
        self._staging = staging
        self._rank = rank
        self._size = len(inputs)
        # Start with the next rank, so that not every rank sends to rank 0 first.
        self._peers = [(rank + distance) % self._size for distance in range(1, self._size)]
        self._dtype = dtype
        self._step = step
        self._inputs = inputs
        self._target = target
        self._outputs = outputs
        self._combine = combine
        self._sent: deque[list[Mark[Any]]] = deque([[], []])  # the transfers that the last two rounds have sent
        self._results: deque[tuple[list[Mark[Any]], list[tuple[Range, Array]]]] = deque()  # arriving, not yet unpacked

    def run(self) -> None:
        """Carry out the reduction.

        Raises:
            PeerFailure, Aborted: as :meth:`~horovod.comm.exchange.base.PeerExchange.wait`.
        """
        contributions = self._send_contributions(0)
        for index in range(-(-max(part.length for part in self._inputs) // self._step)):
            arrived = contributions
            contributions = self._send_contributions(index + 1)
            self._exchange.wait(arrived)
            if len(self._results) == 2:
                self._unpack()
            self._reduce(index)
            if self._outputs:
                self._collect(index)
        while self._results:
            self._unpack()
        for marks in self._sent:
            self._exchange.wait(marks)

    def _send_contributions(self, index: int) -> list[Mark[Any]]:
        """Send piece ``index`` of each part to its owner, and queue the receipt of the contributions to this rank's own part.
        Does nothing past the last piece."""
        self._exchange.wait(self._sent.popleft())
        marks = []
        for r in self._peers:
            piece = self._input(r, index)
            if piece.size:
                marks.append(self._exchange.send(r, as_bytes(piece)))
        self._sent.append(marks)
        length = self._target.piece(index, self._step).length
        if not length:
            return []
        return [self._exchange.receive(r, as_bytes(self._stage("contribution", index, r, length))) for r in self._peers]

    def _reduce(self, index: int) -> None:
        """Reduce piece ``index`` of this rank's own part, for which all contributions have arrived, and send the result to all
        other ranks."""
        target = self._target.piece(index, self._step)
        if not target.length:
            return
        contributions = [
            self._input(r, index) if r == self._rank else self._stage("contribution", index, r, target.length)
            for r in range(self._size)
        ]
        result = target.whole()
        if result is not None:
            self._combine(result, contributions)
        else:
            result = self._stage("result", index, self._rank, target.length)
            self._combine(result, contributions)
            target.write(result)
        if self._outputs:
            data = as_bytes(result)
            self._sent[-1] += [self._exchange.send(r, data) for r in self._peers]

    def _collect(self, index: int) -> None:
        """Queue the receipt of piece ``index`` of every other rank's result.

        The result may overwrite the input from which it was reduced, because the owner has received that input by then.
        """
        marks, staged = [], []
        for r in self._peers:
            output = self._outputs[r].piece(index, self._step)
            if not output.length:
                continue
            array = output.whole()
            if array is None:
                array = self._stage("result", index, r, output.length)
                staged.append((output, array))
            marks.append(self._exchange.receive(r, as_bytes(array)))
        self._results.append((marks, staged))

    def _unpack(self) -> None:
        """Wait for the oldest pending results and copy them to the outputs."""
        marks, staged = self._results.popleft()
        self._exchange.wait(marks)
        for output, array in staged:
            output.write(array)

    def _input(self, rank: int, index: int) -> Array:
        """Piece ``index`` of this rank's input to ``rank``'s part: in place if it is contiguous, else in staging memory."""
        piece = self._inputs[rank].piece(index, self._step)
        array = piece.whole()
        if array is None:
            array = self._stage("input", index, rank, piece.length)
            piece.read(array)
        return array

    def _stage(self, use: str, index: int, rank: int, length: int) -> Array:
        return self._staging.array(use, index % 2, rank, self._dtype, length)
