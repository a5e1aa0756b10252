"""One rank's arithmetic of a compressed reduction: from tensors to packed blocks, and from packed blocks to tensors.

A reduction over n ranks has these steps, whichever engine moves the bytes:

    contribute   a rank packs the blocks that another rank owns, of ``prescale * x + error``
    reduce       the owner adds what the others have sent to its own blocks, in float32 and in rank order after its own, and
                 packs the sum
    finish       every rank, the owner too, unpacks the sum, multiplies it by ``postscale`` and writes it

So all ranks get the same bits, and each contribution and each sum are rounded once. What a rank has rounded away is its error
of these elements; the error of the sum is its owner's. The next reduction of the same tensor adds it (error feedback), so over
many steps the results add up to the sum of all inputs. Which blocks a rank owns depends on the tensor alone
(:mod:`horovod.comm.compression.block_parts`), so neither results nor errors depend on the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np

from horovod.comm.compression.block_parts import NO_BLOCKS, BlockPiece, BlockRun, block_pieces
from horovod.comm.compression.blocks import BlockCoder, can_compress
from horovod.comm.datatypes import Array, DataType
from horovod.comm.reduction import HALVES, narrow, widen
from horovod.comm.spans import Spans

_FLOAT32 = np.dtype(np.float32)

Errors: TypeAlias = Sequence[Array | None]
"""By vector, what earlier reductions have rounded away on this rank, in units of ``prescale * x``: a float32 vector of the same
length, which a reduction reads and overwrites; None for no error feedback."""


def new_errors(tensors: Iterable[tuple[DataType, int]]) -> Errors:
    """Zeros for the tensors that are compressed, which are given by type and number of elements."""
    return [np.zeros(length, _FLOAT32) if can_compress(kind, length) else None for kind, length in tensors]


PIECE_ELEMENTS = 128 << 10
"""Elements that are packed and sent at a time: they and the scratch memory for them fit into a core's cache, and take about a
millisecond on a link of 1 Gbit/s."""

_VALUES, _OTHERS, _SCALED = 0, 1, 2  # scratch vectors


class BlockReduction:
    """One rank's part of one reduction.

    Args:
        coder: of the format, with scratch memory.
        ranks: how many ranks reduce.
        source, target: the vectors; an output may be its input.
        prescale, postscale: factors of inputs and results.
        errors: by vector.
        piece_elements: how many elements travel at a time; the same on all ranks.

    Attributes:
        rounds: how many pieces the longest part has. The part of a rank are the blocks that it owns.
    """

    def __init__(
        self,
        coder: BlockCoder,
        ranks: int,
        source: Spans,
        target: Spans,
        prescale: float,
        postscale: float,
        errors: Errors,
        piece_elements: int = PIECE_ELEMENTS,
    ) -> None:
        form = coder.form
        self._coder = coder
        self._workspace = coder.workspace
        self._source = source
        self._target = target
        self._prescale = np.float32(prescale)
        self._postscale = np.float32(postscale)
        self._errors = errors
        self._parts = block_pieces(tuple(source.layout.sizes), form.block, ranks, max(1, piece_elements // form.block))

        self.rounds = max(map(len, self._parts))

    def piece(self, owner: int, index: int) -> BlockPiece:
        """Piece ``index`` of a rank's part; one without blocks past the last piece."""
        part = self._parts[owner]
        return part[index] if index < len(part) else NO_BLOCKS

    def nbytes(self, piece: BlockPiece) -> int:
        """The bytes of a packed piece."""
        return self._coder.form.nbytes(piece.blocks)

    def contribute(self, piece: BlockPiece, packed: Array) -> None:
        """Pack this rank's contribution to a piece that another rank owns."""
        values = self._values(piece)
        kept = any(self._errors[run.vector] is not None for run in piece.runs)
        unpacked, finite = self._coder.pack(values, packed, read=kept)
        if kept:
            self._keep_errors(piece, values, unpacked, finite)

    def reduce(self, piece: BlockPiece, contributions: Sequence[Array], packed: Array) -> None:
        """Add the packed contributions of all other ranks to this rank's own blocks, pack the sum, and write the result."""
        values = self._values(piece)
        others = self._array(_OTHERS, piece)
        for contribution in contributions:
            self._coder.unpack(contribution, others)
            np.add(values, others, out=values)
        unpacked, finite = self._coder.pack(values, packed)
        self._keep_errors(piece, values, unpacked, finite)
        self._write(piece, unpacked)

    def finish(self, piece: BlockPiece, packed: Array) -> None:
        """Write the result of a piece that another rank owns."""
        values = self._array(_OTHERS, piece)
        self._coder.unpack(packed, values)
        self._write(piece, values)

    def _array(self, use: int, piece: BlockPiece) -> Array:
        block = self._coder.form.block
        return self._workspace.array(use, _FLOAT32, piece.blocks * block).reshape(piece.blocks, block)

    def _values(self, piece: BlockPiece) -> Array:
        """``prescale * x + error`` of a piece, in scratch memory."""
        values = self._array(_VALUES, piece)
        flat = values.reshape(-1)
        position = 0
        for run in piece.runs:
            flat[position : run.place] = 0.0
            position = run.place + run.stop - run.start
            part = flat[run.place : position]
            source = self._source.part(run.vector, run.start, run.stop)
            error = self._error(run)
            if source.dtype != _FLOAT32:
                (widen if source.dtype in HALVES else _cast)(source, part)
                source = part
            if self._prescale != 1.0 or error is None:
                source = np.multiply(source, self._prescale, out=part)
            if error is not None:
                np.add(source, error, out=part)
        flat[position:] = 0.0
        return values

    def _keep_errors(self, piece: BlockPiece, values: Array, unpacked: Array, finite: bool) -> None:
        """Keep what packing has rounded away. Blocks that are not finite have no error: it must not reach later steps."""
        block = self._coder.form.block
        flat, rounded = values.reshape(-1), unpacked.reshape(-1)
        for run in piece.runs:
            error = self._error(run)
            if error is None:
                continue
            part = slice(run.place, run.place + run.stop - run.start)
            np.subtract(flat[part], rounded[part], out=error)
            if not finite:
                for index in np.flatnonzero(np.isnan(rounded[part][::block])).tolist():
                    error[index * block : (index + 1) * block] = 0.0

    def _error(self, run: BlockRun) -> Array | None:
        error = self._errors[run.vector]
        return None if error is None else error[run.start : run.stop]

    def _write(self, piece: BlockPiece, values: Array) -> None:
        """Write ``postscale * values`` over the elements of a piece."""
        flat = values.reshape(-1)
        factor = self._postscale
        for run in piece.runs:
            part = flat[run.place : run.place + run.stop - run.start]
            target = self._target.part(run.vector, run.start, run.stop)
            if target.dtype == _FLOAT32:
                if factor == 1.0:
                    np.copyto(target, part)
                else:
                    np.multiply(part, factor, out=target)
                continue
            if factor != 1.0:
                part = np.multiply(part, factor, out=self._workspace.array(_SCALED, _FLOAT32, part.size))
            (narrow if target.dtype in HALVES else _cast)(part, target)


def _cast(source: Array, target: Array) -> None:
    np.copyto(target, source, casting="unsafe")
