"""Which blocks of which vectors belong to which rank, and how they are cut into pieces. Pure.

Every vector has blocks of its own, which begin at its first element, and its blocks are distributed to the ranks separately. So
the result for a vector does not depend on the vectors that travel with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple


class BlockRun(NamedTuple):
    """Consecutive elements of one vector, from the beginning of a block, as a part of a piece.

    Attributes:
        place: where they begin in the piece, in elements; a multiple of the size of a block.
        vector: the vector's index.
        start, stop: the elements of the vector.
    """

    place: int
    vector: int
    start: int
    stop: int


class BlockPiece(NamedTuple):
    """Blocks that travel together. The elements behind a run, up to the end of its last block, are zeros.

    Attributes:
        blocks: how many.
        runs: the elements of vectors of which they consist.
    """

    blocks: int
    runs: tuple[BlockRun, ...]


NO_BLOCKS = BlockPiece(0, ())


@lru_cache(maxsize=64)
def block_pieces(lengths: tuple[int, ...], block: int, ranks: int, step: int) -> tuple[tuple[BlockPiece, ...], ...]:
    """By rank, the pieces of its part: the blocks that it owns of all vectors, one vector after another.

    Args:
        lengths: of the vectors, in elements.
        step: blocks of a piece; the last piece of a part may have fewer.
    """
    bounds = [_bounds(length, block, ranks) for length in lengths]
    return tuple([_pieces([each[rank : rank + 2] for each in bounds], block, step) for rank in range(ranks)])


@lru_cache(maxsize=64)
def block_chunks(lengths: tuple[int, ...], block: int, step: int) -> tuple[tuple[BlockRun, ...], ...]:
    """Every vector cut into chunks of ``step`` blocks, counted from its own first element, and small chunks of consecutive
    vectors put together, up to ``step`` blocks. So where a vector is cut does not depend on the others."""
    pieces: list[tuple[BlockRun, ...]] = []
    blocks, runs = 0, list[BlockRun]()
    for vector, length in enumerate(lengths):
        for start in range(0, length, step * block):
            stop = min(length, start + step * block)
            added = -(-(stop - start) // block)
            if blocks + added > step:
                pieces.append(tuple(runs))
                blocks, runs = 0, []
            runs.append(BlockRun(blocks * block, vector, start, stop))
            blocks += added
    return (*pieces, tuple(runs)) if runs else tuple(pieces)


def _bounds(length: int, block: int, ranks: int) -> list[int]:
    """Where each rank's share of a vector begins, in elements; the last entry is the vector's end."""
    blocks = -(-length // block)
    return [min(length, blocks * rank // ranks * block) for rank in range(ranks + 1)]


def _pieces(shares: Sequence[Sequence[int]], block: int, step: int) -> tuple[BlockPiece, ...]:
    """The pieces of one rank's part.

    Args:
        shares: by vector, where the rank's share begins and ends.
    """
    pieces: list[BlockPiece] = []
    blocks, runs = 0, list[BlockRun]()
    for vector, (start, end) in enumerate(shares):
        while start < end:
            stop = min(end, start + (step - blocks) * block)
            runs.append(BlockRun(blocks * block, vector, start, stop))
            blocks += -(-(stop - start) // block)
            start = stop
            if blocks == step:
                pieces.append(BlockPiece(blocks, tuple(runs)))
                blocks, runs = 0, []
    if blocks:
        pieces.append(BlockPiece(blocks, tuple(runs)))
    return tuple(pieces)
