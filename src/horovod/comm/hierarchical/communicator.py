"""Collectives in three steps: within each host, between the hosts, and within each host again.

An allreduce of a batch:

    1. reduce-scatter within the host        every rank of a column has its share of the batch, reduced over its host
    2. allreduce of the share in its column  all columns at the same time, so every rank, core and connection works
    3. allgather within the host

A large batch is cut into pieces. While one piece is between the hosts, the next one is reduced and the last one is gathered
within the host, since links between hosts are slow and should never be idle. Allgathers and broadcasts are cut into pieces,
too, which are carried out one after another, so the memory that they need beside the tensors is bounded.

In an allreduce the link of a host carries the data of one rank, instead of the data of every rank of the host. Contributions
are combined in a tree over the ranks of a host, and then in one over the hosts (:mod:`horovod.comm.reduction`). 16-bit floats
accumulate in 32 bits in both steps, and are rounded after each.

Barriers take the same steps. Alltoall and reducescatter use an engine of all ranks: three steps would not reduce their traffic
between hosts. If that engine is ``tcp``, it connects at its first collective (:mod:`horovod.comm.late`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from horovod.comm.base import Communicator
from horovod.comm.compression.block_parts import BlockRun, block_chunks
from horovod.comm.compression.block_reduction import Errors
from horovod.comm.compression.blocks import BlockFormat
from horovod.comm.datatypes import Array
from horovod.comm.engine import Gather
from horovod.comm.hierarchical.background import Background
from horovod.comm.hierarchical.part import PartCommunicator
from horovod.comm.hierarchical.rank_grid import RankGrid
from horovod.comm.ranges import split, split_by_rank
from horovod.comm.reduction import ReduceOp, Workspace
from horovod.comm.spans import Spans, Vectors, arrays_of, spans_of
from horovod.comm.tuned import TunedSettings

PIECE_BYTES = 8 << 20
"""Bytes of a piece: the part of a batch that takes the three steps together."""
COMPRESSED_PIECE_BYTES = 16 << 20
"""The same for a compressed batch: a quarter or an eighth of it travels between the hosts."""

PieceT = TypeVar("PieceT")
ShareT = TypeVar("ShareT")


class _Piece(NamedTuple):
    """Elements ``[start, stop)`` of a batch."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


class HierarchicalCommunicator(Communicator):
    """One rank of a group on several hosts.

    Args:
        grid: the ranks by host and column.
        inside: the communicator of the ranks of this host. This object owns all three communicators from now on.
        across: the communicator of this rank's column; None if this rank is in no column.
        flat: the communicator of all ranks, or a function that makes it with an all-gather of bytes among all ranks.
        allreduce, allgather: whether the operation takes three steps; if not, it uses ``flat``. The same on all ranks.
        piece_bytes: the size of a piece; the same on all ranks.
    """

    name: ClassVar[str] = "hierarchical"
    compresses: bool = True

    def __init__(
        self,
        grid: RankGrid,
        inside: Communicator,
        across: Communicator | None,
        flat: Communicator | Callable[[Gather], Communicator],
        allreduce: bool = True,
        allgather: bool = True,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        super().__init__(grid.rank, sum(len(host) for host in grid.hosts))
        self._grid = grid
        self._inside = PartCommunicator(inside, grid.hosts[grid.host])
        self._across = None if across is None else PartCommunicator(across, grid.column or ())
        self._flat = flat if isinstance(flat, Communicator) else flat(self._gather)
        self.any_thread = all(part.any_thread for part in (inside, across, self._flat) if part is not None)
        self._steps_in_allreduce = allreduce
        self._steps_in_allgather = allgather
        self._piece_bytes = piece_bytes
        self._workspace = Workspace()
        self._background = None if across is None else Background()

    def tune(self, settings: TunedSettings) -> None:
        self._steps_in_allreduce = settings.hierarchical_allreduce
        self._steps_in_allgather = settings.hierarchical_allgather
        for part in self._parts():
            part.tune(settings)

    def _share(self, use: int, dtype: np.dtype[Any], length: int) -> Array:
        return self._workspace.array(use, dtype, length)

    def allreduce(self, inputs: Vectors, outputs: Vectors, op: ReduceOp, prescale: float, postscale: float) -> None:
        if not self._steps_in_allreduce:
            self._flat.allreduce(inputs, outputs, op, prescale, postscale)
            return
        source, target = spans_of(inputs), spans_of(outputs)
        if not source.length:
            return
        step = max(1, self._piece_bytes // source.dtype.itemsize)
        self._in_three_steps(
            [_Piece(start, min(start + step, source.length)) for start in range(0, source.length, step)],
            lambda piece, slot: self._reduce_inside(source, piece, slot, op, prescale),
            lambda piece, share: self._between.allreduce([share], [share], op, 1.0, postscale),
            lambda piece, share: self._gather_inside(target, piece, share),
        )

    def allreduce_compressed(
        self, inputs: Vectors, outputs: Vectors, prescale: float, postscale: float, form: BlockFormat, errors: Errors
    ) -> None:
        """Every vector is cut into pieces of its own, so that who owns what does not depend on the batch."""
        if not self._steps_in_allreduce:
            self._flat.allreduce_compressed(inputs, outputs, prescale, postscale, form, errors)
            return
        source, target = spans_of(inputs), spans_of(outputs)
        grid, dtype = self._grid, source.dtype

        def shares(piece: Sequence[BlockRun]) -> list[list[int]]:
            return [grid.shares(run.stop - run.start, block=form.block) for run in piece]

        def reduce_inside(piece: Sequence[BlockRun], slot: int) -> list[Array]:
            counts = shares(piece)
            lengths = [count[grid.index] for count in counts]
            own = split(self._share(slot, dtype, sum(lengths)), lengths)
            views = [source.part(run.vector, run.start, run.stop) for run in piece]
            self._inside.reducescatter(views, own, counts, ReduceOp.SUM, prescale, 1.0)
            return own

        def reduce_between(piece: Sequence[BlockRun], own: list[Array]) -> None:
            kept: list[Array | None] = []
            for run, count in zip(piece, shares(piece), strict=True):
                error, start = errors[run.vector], run.start + sum(count[: grid.index])
                kept.append(None if error is None else error[start : start + count[grid.index]])
            self._between.allreduce_compressed(own, own, 1.0, postscale, form, kept)

        def gather_inside(piece: Sequence[BlockRun], own: list[Array]) -> None:
            views = [target.part(run.vector, run.start, run.stop) for run in piece]
            self._inside.allgather(own, views, shares(piece))

        step = COMPRESSED_PIECE_BYTES * self._piece_bytes // PIECE_BYTES // dtype.itemsize // form.block
        pieces = block_chunks(tuple(source.layout.sizes), form.block, max(1, step))
        self._in_three_steps(pieces, reduce_inside, reduce_between, gather_inside)

    def _in_three_steps(
        self,
        pieces: Sequence[PieceT],
        inside: Callable[[PieceT, int], ShareT],
        between: Callable[[PieceT, ShareT], object],
        gather: Callable[[PieceT, ShareT], None],
    ) -> None:
        """Take each piece through the three steps: the next one is reduced inside, and the last one gathered, while one is
        between the hosts.

        Args:
            inside: ``inside(piece, slot)`` returns this rank's share. Two pieces in turn have different slots.
            between: reduces a share over the hosts. Not called on a rank in no column.
            gather: writes the result of a piece.
        """
        before: tuple[PieceT, ShareT, Future[object] | None] | None = None

        def finish(piece: PieceT, share: ShareT, travelling: Future[object] | None) -> None:
            if travelling is not None:
                travelling.result()  # an abort ends the collective between hosts, and so this wait
            gather(piece, share)

        for index, piece in enumerate(pieces):
            share = inside(piece, index % 2)
            travelling = None
            if self._background is not None:
                if len(pieces) == 1:
                    between(piece, share)
                else:
                    travelling = self._background.submit(partial(between, piece, share))
            if before is not None:
                finish(*before)
            before = piece, share, travelling
        if before is not None:
            finish(*before)

    @property
    def _between(self) -> Communicator:
        """The communicator of this rank's column, which it is in."""
        assert self._across is not None
        return self._across

    def _reduce_inside(self, source: Spans, piece: _Piece, slot: int, op: ReduceOp, prescale: float) -> Array:
        """This rank's share of a piece, reduced over its host."""
        grid, dtype = self._grid, source.dtype
        counts = grid.shares(piece.length)
        share = self._share(slot, dtype, counts[grid.index])
        packed = source.whole(piece.start, piece.stop)
        if packed is None:
            packed = self._share(2, dtype, piece.length)
            source.read(piece.start, piece.stop, packed)
        self._inside.reducescatter([packed], [share], [counts], op, prescale, 1.0)
        return share

    def _gather_inside(self, target: Spans, piece: _Piece, share: Array) -> None:
        """Gather the shares of this host's ranks, which have been reduced over the hosts."""
        counts = self._grid.shares(piece.length)
        result = target.whole(piece.start, piece.stop)
        if result is not None:
            self._inside.allgather([share], [result], [counts])
        else:
            result = self._share(2, share.dtype, piece.length)
            self._inside.allgather([share], [result], [counts])
            target.write(piece.start, piece.stop, result)

    def allgather(self, inputs: Vectors, outputs: Vectors, counts: Sequence[Sequence[int]]) -> None:
        if not self._steps_in_allgather:
            self._flat.allgather(inputs, outputs, counts)
        else:
            self._allgather_in_steps(inputs, outputs, counts)

    def _gather(self, own: bytes) -> list[bytes]:
        """All-gather bytes; return those of all ranks, by rank. All ranks must call it."""
        lengths = np.empty(self.size, np.int64)
        self._allgather_in_steps([np.array([len(own)], np.int64)], [lengths], [[1] * self.size])
        everything = np.empty(int(lengths.sum()), np.uint8)
        self._allgather_in_steps([np.frombuffer(own, np.uint8)], [everything], [lengths.tolist()])
        return [each.tobytes() for each in split(everything, lengths.tolist())]

    def _allgather_in_steps(self, inputs: Vectors, outputs: Vectors, counts: Sequence[Sequence[int]]) -> None:
        source = spans_of(inputs)
        if not len(source):
            return
        targets = [spans_of(views) for views in split_by_rank(arrays_of(outputs), counts)]
        lengths = np.array([target.length for target in targets])
        start, longest = 0, int(lengths.max())
        while start < longest:
            senders = int((lengths > start).sum())
            stop = min(longest, start + max(1, self._piece_bytes // source.dtype.itemsize // senders))
            ranges = [_Piece(min(start, length), min(stop, length)) for length in lengths.tolist()]
            self._allgather_piece(source, targets, ranges)
            start = stop

    def _allgather_piece(self, source: Spans, targets: Sequence[Spans], ranges: Sequence[_Piece]) -> None:
        """Gather a range of each rank's vector.

        Args:
            source: this rank's vector.
            targets: by rank, the memory for that rank's vector.
            ranges: by rank, the range of that rank's vector.
        """
        dtype, grid, mine = source.dtype, self._grid, ranges[self.rank]
        lengths = [each.length for each in ranges]
        own = self._share(0, dtype, mine.length)
        source.read(*mine, own)
        # First the contributions of this host's ranks, concatenated; then those of all hosts.
        host = grid.hosts[grid.host]
        ours = self._share(1, dtype, sum(lengths[rank] for rank in host))
        self._inside.allgather([own], [ours], [[lengths[rank] for rank in host]])
        totals = [sum(lengths[rank] for rank in ranks) for ranks in grid.hosts]
        shares = [grid.shares(total, index) for index, total in enumerate(totals)]
        column: Array = np.empty(0, dtype)
        if self._across is not None:
            own_share = split(ours, shares[grid.host])[grid.index]
            column_counts = [share[grid.index] for share in shares]
            column = self._share(2, dtype, sum(column_counts))
            self._across.allgather([own_share], [column], [column_counts])
        columns = [sum(share[index] for share in shares) if index < grid.columns else 0 for index in range(len(host))]
        everything = self._share(3, dtype, sum(columns))
        self._inside.allgather([column], [everything], [columns])
        self._unpack(everything, targets, ranges, shares, columns)

    def _unpack(
        self,
        everything: Array,
        targets: Sequence[Spans],
        ranges: Sequence[_Piece],
        shares: Sequence[Sequence[int]],
        columns: Sequence[int],
    ) -> None:
        """Copy the gathered data, which is in the order of columns and, within a column, of hosts, to the targets."""
        grid = self._grid
        pieces = [
            split(column, [share[index] for share in shares])
            for index, column in enumerate(split(everything, columns)[: grid.columns])
        ]
        for index, ranks in enumerate(grid.hosts):
            host = spans_of([piece[index] for piece in pieces])
            position = 0
            for rank in ranks:
                for run in targets[rank].runs(*ranges[rank]):
                    host.read(position, position + run.size, run)
                    position += run.size

    def broadcast(self, vectors: Vectors, root: int) -> None:
        grid = self._grid
        root_host = next(index for index, ranks in enumerate(grid.hosts) if root in ranks)
        at_root = grid.host == root_host
        for array in arrays_of(vectors):
            step = max(1, self._piece_bytes // array.itemsize)
            for start in range(0, array.size, step):
                piece = array[start : start + step]
                if at_root:
                    self._inside.broadcast([piece], grid.hosts[root_host].index(root))
                counts = grid.shares(piece.size)
                share = split(piece, counts)[grid.index]
                if self._across is not None:
                    self._across.broadcast([share], root_host)
                if not at_root:
                    own = self._share(0, piece.dtype, share.size)
                    np.copyto(own, share)
                    self._inside.allgather([own], [piece], [counts])

    def alltoall(
        self, source: Vectors, target: Vectors, sent: Sequence[int], received: Sequence[int], longest: int
    ) -> None:
        self._flat.alltoall(source, target, sent, received, longest)

    def reducescatter(
        self,
        inputs: Vectors,
        outputs: Vectors,
        counts: Sequence[Sequence[int]],
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> None:
        self._flat.reducescatter(inputs, outputs, counts, op, prescale, postscale)

    def barrier(self) -> None:
        self._inside.barrier()
        if self._across is not None and self._grid.index == 0:
            self._across.barrier()  # the first column has a rank of every host
        self._inside.barrier()

    def _parts(self) -> list[Communicator]:
        return [each for each in (self._inside, self._across, self._flat) if each is not None]

    def abort(self) -> None:
        for each in self._parts():
            each.abort()

    def may_still_read(self) -> bool:
        return any(each.may_still_read() for each in self._parts())

    def may_still_write(self) -> bool:
        return any(each.may_still_write() for each in self._parts())

    def engines(self) -> list[str]:
        return [self.name, *dict.fromkeys(name for each in self._parts() for name in each.engines())]

    def descriptors(self) -> list[int]:
        return [descriptor for each in self._parts() for descriptor in each.descriptors()]

    def close(self) -> None:
        if self._background is not None and self._across is not None:
            if not self._background.idle():
                self._across.abort()
            self._background.close()
        for each in self._parts():
            each.close()
