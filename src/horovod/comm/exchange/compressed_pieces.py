"""The pieces of a reduction that is sent as packed blocks (:mod:`horovod.comm.compression`)."""

from __future__ import annotations

import numpy as np

from horovod.comm.compression.block_reduction import BlockReduction
from horovod.comm.datatypes import Array
from horovod.comm.exchange.reduction_memory import Staging, as_bytes
from horovod.comm.exchange.sharded_reduction import Buffers, PieceSource

_BYTE = np.dtype(np.uint8)


class CompressedPieces(PieceSource):
    """One rank's pieces.

    Args:
        staging: memory for packed pieces.
        rank, size: this rank's index in the group, and the size of the group.
        reduction: this rank's arithmetic.
    """

    has_results = True

    def __init__(self, staging: Staging, rank: int, size: int, reduction: BlockReduction) -> None:
        self.rounds = reduction.rounds
        self._staging = staging
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]
        self._reduction = reduction

    def contribution(self, rank: int, index: int) -> Buffers:
        packed = self._stage("contribution sent", index, rank, rank)
        if packed.size:
            self._reduction.contribute(self._reduction.piece(rank, index), packed)
        return _buffers(packed)

    def room(self, rank: int, index: int) -> Buffers:
        return _buffers(self._stage("contribution", index, rank, self._rank))

    def reduce(self, index: int) -> Buffers:
        packed = self._stage("result", index, self._rank, self._rank)
        if packed.size:
            contributions = [self._stage("contribution", index, rank, self._rank) for rank in self._others]
            self._reduction.reduce(self._reduction.piece(self._rank, index), contributions, packed)
        return _buffers(packed)

    def result_room(self, rank: int, index: int) -> Buffers:
        return _buffers(self._stage("result", index, rank, rank))

    def unpack(self, rank: int, index: int) -> None:
        self._reduction.finish(self._reduction.piece(rank, index), self._stage("result", index, rank, rank))

    def _stage(self, use: str, index: int, rank: int, owner: int) -> Array:
        """Staging memory for piece ``index`` of the part of ``owner``."""
        length = self._reduction.nbytes(self._reduction.piece(owner, index))
        return self._staging.array(use, index % 2, rank, _BYTE, length)


def _buffers(packed: Array) -> Buffers:
    return (as_bytes(packed),) if packed.size else ()
