"""The pieces of a reduction that is sent as it is.

Data that is contiguous in the caller's arrays is sent from there and received there. Other data passes through staging memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from horovod.comm.datatypes import Array
from horovod.comm.exchange.reduction_memory import Staging, as_bytes
from horovod.comm.exchange.sharded_reduction import Buffers, PieceSource
from horovod.comm.ranges import Range


class PlainPieces(PieceSource):
    """One rank's pieces.

    Args:
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
        staging: Staging,
        rank: int,
        dtype: np.dtype[Any],
        step: int,
        inputs: Sequence[Range],
        target: Range,
        outputs: Sequence[Range],
        combine: Callable[[Array, Sequence[Array]], None],
    ) -> None:
        self.rounds = -(-max(part.length for part in inputs) // step)
        self.has_results = bool(outputs)
        self._staging = staging
        self._rank = rank
        self._dtype = dtype
        self._step = step
        self._inputs = inputs
        self._target = target
        self._outputs = outputs
        self._combine = combine
        self._staged: dict[tuple[int, int], tuple[Range, Array]] = {}  # results on their way to staging memory

    def contribution(self, rank: int, index: int) -> Buffers:
        piece = self._input(rank, index)
        return (as_bytes(piece),) if piece.size else ()

    def room(self, rank: int, index: int) -> Buffers:
        length = self._target.piece(index, self._step).length
        return (as_bytes(self._stage("contribution", index, rank, length)),) if length else ()

    def reduce(self, index: int) -> Buffers:
        target = self._target.piece(index, self._step)
        if not target.length:
            return ()
        contributions = [
            self._input(r, index) if r == self._rank else self._stage("contribution", index, r, target.length)
            for r in range(len(self._inputs))
        ]
        result = target.whole()
        if result is not None:
            self._combine(result, contributions)
        else:
            result = self._stage("result", index, self._rank, target.length)
            self._combine(result, contributions)
            target.write(result)
        return (as_bytes(result),)

    def result_room(self, rank: int, index: int) -> Buffers:
        output = self._outputs[rank].piece(index, self._step)
        if not output.length:
            return ()
        array = output.whole()
        if array is None:
            array = self._stage("result", index, rank, output.length)
            self._staged[rank, index] = output, array
        return (as_bytes(array),)

    def unpack(self, rank: int, index: int) -> None:
        staged = self._staged.pop((rank, index), None)
        if staged is not None:
            output, array = staged
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
