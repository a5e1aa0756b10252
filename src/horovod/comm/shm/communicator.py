"""The engine for ranks of one host: NumPy over a shared arena. The default for CPU tensors.

A reduction streams through the arena in pieces small enough for the cache. Every rank owns one shard of each piece::

    pack     copy the shards that others own from the tensors into my contribution          then count "packed"
    reduce   reduce all ranks' contributions to my shard into the result                    then count "reduced"
    unpack   copy the whole result into the tensors

A rank reads its own contribution to its own shard directly from the tensors, unless they are so small that the kernel gathers
them all. There is always work between counting and waiting: a rank packs the next piece before it waits for the result of this
one. Piece k uses slot k mod 2 (:mod:`horovod.comm.shm.counters`). No slot is overwritten too early:

* A rank writes its contribution to piece k after every peer has counted k-1 packed pieces. A peer counts a piece as packed only
  when it has finished reading the contributions to the piece before.
* A rank writes its shard of the result of piece k after every peer has packed piece k. A peer packs piece k after it has
  unpacked piece k-2.

In a small reduction every rank packs its whole vector, waits once, and reduces the whole vectors of all ranks. The other
operations wait once per piece.

Large collectives can bypass the arena if the kernel lets ranks read one another's memory
(:mod:`horovod.comm.shm.direct_reads`). Then only addresses go through the arena, one piece per exchange. The ranks time both
paths and use the faster one (:mod:`horovod.comm.shm.large`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import numpy as np

from horovod.comm.base import Communicator, OnStall, give_up
from horovod.comm.datatypes import Array
from horovod.comm.ranges import parts_of, shard_bounds, split_by_rank
from horovod.comm.reduction import ReduceOp, Workspace, reduce_into
from horovod.comm.shm.arena import Arena
from horovod.comm.shm.counters import LONG_SPIN, Counters, Pieces
from horovod.comm.shm.direct_reads import DirectCollectives
from horovod.comm.shm.futex_words import PACKED, REDUCED
from horovod.comm.shm.large import SCATTERED, Large
from horovod.comm.spans import Spans, Vectors, arrays_of, source_and_target, spans_of
from horovod.comm.tuned import TunedSettings

SMALL = 32 << 10
"""Largest reduction, in bytes, in which every rank reduces the whole vectors after a single wait."""

_SCATTERED_SHARD = 128 << 10
"""The most bytes of a piece of small vectors that a rank reduces. So a piece of two ranks stays in a core's second cache, with
what it is made of and its result: 500 vectors of 4 KB take a twelfth less time than in pieces of 1 MiB."""

MANY = 32
"""Smallest number of vectors for which an allreduce always streams, so that the kernel copies them in one call, even if they
are small in total: that saves more than the second wait costs."""


class ShmCommunicator(Communicator):
    """One rank of a group on one host.

    Args:
        rank, size: this rank's index in the group, and the size of the group.
        arena: attached by every rank; this communicator owns it from now on.
        stall_timeout: how long a peer may make no progress while this rank waits for it.
        reading: when ranks read one another's memory, see :class:`~horovod.comm.shm.large.Large`.
        on_stall: called when a peer has made no progress for ``stall_timeout``.
        spins: whether to poll for a while before sleeping; false if a peer may need the core.
    """

    name: ClassVar[str] = "shm"

    def __init__(
        self,
        rank: int,
        size: int,
        arena: Arena,
        stall_timeout: timedelta,
        reading: str,
        on_stall: OnStall = give_up,
        spins: bool = True,
    ) -> None:
        super().__init__(rank, size)
        self._arena = arena
        self._counters = Counters(arena, rank, size, stall_timeout, on_stall, spins)
        self._workspace = Workspace()
        self._peers = [peer for peer in range(size) if peer != rank]
        self._pieces = pieces = Pieces(arena, self._counters, rank, size)
        self._begin, self._region, self._start = pieces.begin, pieces.region, pieces.start
        self._reduced = 0
        self._large = Large(rank, reading, pieces.exchange, arena.piece_bytes, self._counters.advance, self._workspace)

    def tune(self, settings: TunedSettings) -> None:
        self._large.read_by(settings.shm_direct)

    def allreduce(self, inputs: Vectors, outputs: Vectors, op: ReduceOp, prescale: float, postscale: float) -> None:
        self._counters.check()
        source, target = source_and_target(inputs, outputs)
        if source.length == 0:
            return
        dtype = source.dtype
        # All ranks must choose the same path, so the choice must not depend on whether vectors are given by their addresses.
        nbytes = source.length * dtype.itemsize
        if len(source) < MANY and nbytes <= min(SMALL, self._arena.piece_bytes):
            self._allreduce_small(source, target, dtype, op, prescale, postscale)
            return
        self._large.run(
            "allreduce",
            nbytes,
            len(source),
            2 * len(source),
            lambda direct: direct.allreduce(source, target, op, prescale, postscale),
            lambda: self._allreduce_streamed(source, target, dtype, op, prescale, postscale),
        )

    def _allreduce_small(
        self, source: Spans, target: Spans, dtype: np.dtype[Any], op: ReduceOp, prescale: float, postscale: float
    ) -> None:
        length = source.length
        piece = self._begin()
        source.read(0, length, self._region(piece, self.rank, dtype)[:length])
        self._counters.signal(PACKED, piece)
        self._counters.wait_all(PACKED, piece, LONG_SPIN)
        contributions = [self._region(piece, rank, dtype)[:length] for rank in range(self.size)]
        target.reduce(0, length, contributions, op, prescale, postscale, self._workspace)

    def _allreduce_streamed(
        self, source: Spans, target: Spans, dtype: np.dtype[Any], op: ReduceOp, prescale: float, postscale: float
    ) -> None:
        counters, size, rank = self._counters, self.size, self.rank
        factor = 1.0
        scattered = source.length * dtype.itemsize < SCATTERED * len(source)
        if dtype.kind == "f" and dtype.itemsize >= 4 and not scattered:
            # Every rank scales while it unpacks: multiplying costs no more than copying, and saves the shard's owner a pass.
            postscale, factor = 1.0, postscale
        nbytes = self._arena.piece_bytes
        if scattered:
            nbytes = min(nbytes, size * _SCATTERED_SHARD)
        step = nbytes // dtype.itemsize
        starts = range(0, source.length, step)
        pack = self._pack_all if scattered else self._pack_shards
        piece = pack(source, 0, min(step, source.length), dtype)
        for start in starts:
            stop = min(start + step, source.length)
            bounds = shard_bounds(stop - start, size)
            counters.wait_all(PACKED, piece)
            if bounds[rank] < bounds[rank + 1]:
                own = [] if scattered else source.runs(start + bounds[rank], start + bounds[rank + 1])
                self._reduce_shard(own, bounds, piece, dtype, op, prescale, postscale)
            self._reduced += 1
            counters.signal(REDUCED, self._reduced)
            current = piece
            if stop < source.length:
                piece = pack(source, stop, min(stop + step, source.length), dtype)
            counters.wait_all(REDUCED, self._reduced)
            if scattered:
                self._unpack_all(target, start, stop, current, dtype)
            else:
                target.write(start, stop, self._region(current, size, dtype)[: stop - start], factor)

    def _pack_shards(self, source: Spans, start: int, stop: int, dtype: np.dtype[Any]) -> int:
        """Contribute elements ``[start, stop)``, without this rank's own shard, as the next piece; return its number."""
        piece = self._begin()
        region = self._region(piece, self.rank, dtype)
        bounds = shard_bounds(stop - start, self.size)
        before, after = bounds[self.rank], bounds[self.rank + 1]
        source.read(start, start + before, region[:before])
        source.read(start + after, stop, region[after : stop - start])
        self._counters.signal(PACKED, piece)
        return piece

    def _pack_all(self, source: Spans, start: int, stop: int, dtype: np.dtype[Any]) -> int:
        """Contribute elements ``[start, stop)``, with this rank's own shard, as the next piece; return its number."""
        piece = self._begin()
        if source.addresses:
            begin = self._start(piece, self.rank)
            self._arena.gather(begin, begin + (stop - start) * dtype.itemsize, source.iovecs(start, stop))
        else:
            source.read(start, stop, self._region(piece, self.rank, dtype)[: stop - start])
        self._counters.signal(PACKED, piece)
        return piece

    def _unpack_all(self, target: Spans, start: int, stop: int, piece: int, dtype: np.dtype[Any]) -> None:
        """Copy a piece's result over elements ``[start, stop)``."""
        begin = self._start(piece, self.size)
        end = begin + (stop - start) * dtype.itemsize
        if target.addresses:
            self._arena.scatter(begin, end, target.iovecs(start, stop))
        elif dtype.kind != "V":
            self._arena.scatter_over(begin, end, target.runs(start, stop))
        else:  # not a built-in NumPy type, so it has no buffer protocol
            target.write(start, stop, self._region(piece, self.size, dtype)[: stop - start])

    def _reduce_shard(
        self,
        own: Sequence[Array],
        bounds: Sequence[int],
        piece: int,
        dtype: np.dtype[Any],
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> None:
        """Fold all contributions to this rank's shard of a piece into the result.

        Args:
            own: the runs of this rank's own contribution; empty if it has been packed.
            bounds: the bounds of all shards in the piece, as :func:`~horovod.comm.ranges.shard_bounds` returns them.
        """
        low, high = bounds[self.rank], bounds[self.rank + 1]
        regions = [self._region(piece, rank, dtype) for rank in range(self.size)]
        result = self._region(piece, self.size, dtype)
        for run in own or [regions[self.rank][low:high]]:
            contributions = [region[low : low + run.size] for region in regions]
            contributions[self.rank] = run
            reduce_into(result[low : low + run.size], contributions, op, prescale, postscale, self._workspace)
            low += run.size

    def allgather(self, inputs: Vectors, outputs: Vectors, counts: Sequence[Sequence[int]]) -> None:
        self._counters.check()
        targets = [spans_of(views) for views in split_by_rank(arrays_of(outputs), counts)]
        longest = max((target.length for target in targets), default=0)
        if longest == 0:
            return
        source, dtype = spans_of(inputs), arrays_of(inputs)[0].dtype
        nbytes = sum(target.length for target in targets) * dtype.itemsize
        self._large.run(
            "allgather",
            nbytes,
            self.size * len(source),
            len(source),
            lambda direct: direct.allgather(source, targets),
            lambda: self._allgather_streamed(source, targets, longest, dtype),
        )

    def _allgather_streamed(self, source: Spans, targets: Sequence[Spans], longest: int, dtype: np.dtype[Any]) -> None:
        step = self._arena.piece_bytes // dtype.itemsize
        for start in range(0, longest, step):
            piece = self._begin()
            stop = min(start + step, source.length)
            if start < stop:
                source.read(start, stop, self._region(piece, self.rank, dtype)[: stop - start])
            self._counters.signal(PACKED, piece)
            for rank in (self.rank, *self._peers):  # this rank's own data first, while the others pack
                target = targets[rank]
                stop = min(start + step, target.length)
                if rank != self.rank:
                    self._counters.wait(rank, PACKED, piece)
                if start < stop:
                    target.write(start, stop, self._region(piece, rank, dtype)[: stop - start])

    def broadcast(self, vectors: Vectors, root: int) -> None:
        self._counters.check()
        for array in arrays_of(vectors):
            self._broadcast(array, root)

    def _broadcast(self, array: Array, root: int) -> None:
        self._large.run(
            "broadcast",
            array.nbytes,
            1,
            1,
            lambda direct: direct.broadcast(array, root),
            lambda: self._broadcast_streamed(array, root),
        )

    def _broadcast_streamed(self, array: Array, root: int) -> None:
        step = self._arena.piece_bytes // array.itemsize
        for start in range(0, array.size, step):
            part = array[start : start + step]
            if self.rank == root:
                piece = self._begin(LONG_SPIN)
                self._region(piece, root, array.dtype)[: part.size] = part
                self._counters.signal(PACKED, piece)
            else:
                piece = self._pieces.skip()
                self._counters.wait(root, PACKED, piece, LONG_SPIN)
                part[:] = self._region(piece, root, array.dtype)[: part.size]

    def alltoall(
        self, source: Vectors, target: Vectors, sent: Sequence[int], received: Sequence[int], longest: int
    ) -> None:
        self._counters.check()
        outgoing, incoming = parts_of(source, sent), parts_of(target, received)
        itemsize = outgoing[0].itemsize

        def streamed() -> None:
            step = self._arena.piece_bytes // itemsize // self.size
            for number in range(-(-longest // step)):
                self._alltoall_round(outgoing, incoming, number, step)

        def directly(direct: DirectCollectives) -> bool:
            if not direct.alltoall(outgoing, incoming):
                return False
            np.copyto(incoming[self.rank], outgoing[self.rank])
            return True

        self._large.run(
            "alltoall",
            longest * self.size * itemsize,
            self.size,
            self.size,
            directly,
            streamed,
        )

    def _alltoall_round(self, outgoing: Sequence[Array], incoming: Sequence[Array], number: int, step: int) -> None:
        """Exchange elements ``[number * step, (number + 1) * step)`` of the data for each rank. Waits only for ranks from which
        something comes: in a gather only its root waits, and in a scatter its root does not."""
        piece, part, dtype = self._begin(), slice(number * step, (number + 1) * step), outgoing[0].dtype
        region = self._region(piece, self.rank, dtype)
        for rank in self._peers:
            some = outgoing[rank][part]
            region[rank * step : rank * step + some.size] = some
        self._counters.signal(PACKED, piece)
        incoming[self.rank][part] = outgoing[self.rank][part]  # while the others pack
        for rank in self._peers:
            some = incoming[rank][part]
            if some.size:
                self._counters.wait(rank, PACKED, piece)
                some[:] = self._region(piece, rank, dtype)[self.rank * step : self.rank * step + some.size]

    def reducescatter(
        self,
        inputs: Vectors,
        outputs: Vectors,
        counts: Sequence[Sequence[int]],
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> None:
        self._counters.check()
        shards = [spans_of(views) for views in split_by_rank(arrays_of(inputs), counts)]
        longest = max((shard.length for shard in shards), default=0)
        if longest == 0:
            return
        target, dtype = spans_of(outputs), arrays_of(inputs)[0].dtype
        nbytes = sum(shard.length for shard in shards) * dtype.itemsize
        self._large.run(
            "reducescatter",
            nbytes,
            self.size * len(target),
            self.size * len(target),
            lambda direct: direct.reducescatter(shards, target, op, prescale, postscale),
            lambda: self._reducescatter_streamed(shards, target, longest, dtype, op, prescale, postscale),
        )

    def _reducescatter_streamed(
        self,
        shards: Sequence[Spans],
        target: Spans,
        longest: int,
        dtype: np.dtype[Any],
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> None:
        step = self._arena.piece_bytes // dtype.itemsize // self.size
        for start in range(0, longest, step):
            piece = self._begin()
            region = self._region(piece, self.rank, dtype)
            for rank in self._peers:
                stop = min(start + step, shards[rank].length)
                if start < stop:
                    shards[rank].read(start, stop, region[rank * step : rank * step + stop - start])
            self._counters.signal(PACKED, piece)
            self._counters.wait_all(PACKED, piece)
            length = min(start + step, target.length) - start
            if length > 0:
                own = shards[self.rank].whole(start, start + length)
                if own is None:
                    own = self._workspace.array(3, dtype, length)
                    shards[self.rank].read(start, start + length, own)
                contributions = [
                    self._region(piece, rank, dtype)[self.rank * step : self.rank * step + length]
                    for rank in range(self.size)
                ]
                contributions[self.rank] = own
                target.reduce(start, start + length, contributions, op, prescale, postscale, self._workspace)

    def barrier(self) -> None:
        self._counters.check()
        piece = self._begin()
        self._counters.signal(PACKED, piece)
        self._counters.wait_all(PACKED, piece)

    def abort(self) -> None:
        self._counters.abort()

    def descriptors(self) -> list[int]:
        return [self._arena.descriptor]

    def close(self) -> None:
        self._counters.release()
        self._pieces.release()
        self._arena.close()
