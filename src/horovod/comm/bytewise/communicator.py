"""Every collective of the contract over a library of collectives on bytes: what ``gloo`` and ``ccl`` have in common.

The library moves bytes, and Horovod reduces. So all data types work, 16-bit floats accumulate in 32 bits, every element is
combined in the same tree (:mod:`horovod.comm.reduction`), and results have the same bits as with Horovod's own engines. An
allreduce of a piece has three steps,

    exchange    each rank gets all ranks' contributions to its share of the piece
    reduce      each rank reduces its share
    gather      all ranks get all shares

which together move as many bytes as a ring allreduce. The next piece travels while one is reduced. The size of pieces bounds
the memory: ranges that are contiguous in the caller's vectors are passed in place, others are copied through staging memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from horovod.comm.base import Communicator
from horovod.comm.bytewise.base import ByteCollectives
from horovod.comm.compression.block_reduction import BlockReduction, Errors
from horovod.comm.compression.blocks import BlockCoders, BlockFormat
from horovod.comm.datatypes import Array
from horovod.comm.ranges import Range, parts_of, split, split_by_rank
from horovod.comm.reduction import ReduceOp, Workspace, reduce_into
from horovod.comm.spans import Spans, Vectors, arrays_of, source_and_target, spans_of

PIECE_BYTES = 8 << 20
"""Bytes of a batch that one rank contributes to a reduction at a time: the next piece travels while one is reduced."""
MOVED_PIECES = 4
"""Pieces are this many times larger if nothing is reduced. Between 2 ranks of one host, a broadcast of 64 MB by Gloo takes a
fifth longer in pieces of 8 MB than in one piece, and the same time in pieces of 32 MB."""

DIRECT_BYTES = 1 << 20
"""The largest allreduce in which every rank gets the whole vectors of all ranks: one collective instead of two."""
DIRECT_EXCESS_BYTES = 32 << 10
"""The most bytes that a rank may send in such an allreduce beyond those of two collectives; sending more costs more time
than one collective saves."""


def _bytes(arrays: Sequence[Array]) -> list[Array]:
    return [array.view(np.uint8) for array in arrays]


class _Receipt(NamedTuple):
    """A running transfer.

    Attributes:
        started: the library's value to wait for.
        unpack: the ranges to write from staging memory afterwards.
    """

    started: Any
    unpack: Sequence[tuple[Range, Array]] = ()


class BytewiseCommunicator(Communicator):
    """One rank of a group.

    Args:
        rank, size: this rank's index in the group, and the size of the group.
        collectives: of the same group. This object owns them from now on.
        piece_bytes: bytes that a rank contributes to a reduction at a time; the same on all ranks.
        between_hosts: whether some ranks are on other hosts, so that compression may pay; the same on all ranks.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        collectives: ByteCollectives,
        piece_bytes: int = PIECE_BYTES,
        between_hosts: bool = False,
    ) -> None:
        super().__init__(rank, size)
        self.compresses = between_hosts
        self._coders = BlockCoders()
        self._collectives = collectives
        self._piece_bytes = piece_bytes
        self._moved_bytes = piece_bytes * MOVED_PIECES
        self._workspace = Workspace()
        self._memory: dict[str, Array] = {}

    def _stage(self, use: str, dtype: np.dtype[Any], length: int) -> Array:
        """A vector of staging memory. The next call with the same ``use`` gets the same memory."""
        nbytes = length * dtype.itemsize
        memory = self._memory.get(use)
        if memory is None or memory.size < nbytes:
            memory = self._memory[use] = np.empty(nbytes, np.uint8)
        return memory[:nbytes].view(dtype)

    def _arrays(self, use: str, dtype: np.dtype[Any], ranges: Sequence[Range]) -> tuple[list[Array], list[int]]:
        """Each range as one array, in place if it is contiguous, else in staging memory; and the indices of the staged ones."""
        found = [each.whole() for each in ranges]
        apart = [index for index, array in enumerate(found) if array is None]
        memory = self._stage(use, dtype, sum(ranges[index].length for index in apart))
        staged = iter(split(memory, [ranges[index].length for index in apart]))
        return [next(staged) if array is None else array for array in found], apart

    def _sources(self, use: str, dtype: np.dtype[Any], ranges: Sequence[Range]) -> list[Array]:
        """The contents of each range as one array, in place if it is contiguous, else copied to staging memory."""
        arrays, apart = self._arrays(use, dtype, ranges)
        for index in apart:
            ranges[index].read(arrays[index])
        return arrays

    def _gather(self, use: str, own: Array, ranges: Sequence[Range]) -> _Receipt:
        """Start to send ``own`` to every other rank, and to receive theirs into ``ranges``, which are by rank.

        This rank's own range is not written."""
        longest = max(each.length for each in ranges)
        others = [each if rank != self.rank else each._replace(stop=each.start) for rank, each in enumerate(ranges)]
        arrays, apart = self._arrays(use, own.dtype, others)
        started = self._collectives.gather(own.view(np.uint8), _bytes(arrays), longest * own.itemsize)
        return _Receipt(started, [(others[index], arrays[index]) for index in apart])

    def _finish(self, receipt: _Receipt) -> None:
        self._collectives.wait(receipt.started)
        for target, array in receipt.unpack:
            target.write(array)

    def _contributions(self, use: str, dtype: np.dtype[Any], ranges: Sequence[Range]) -> _Contributions:
        """Start to send each rank its range, and to receive the other ranks' contributions to this rank's range.

        Args:
            ranges: by rank, the elements that this rank contributes to the part that the rank owns.
        """
        longest = max(each.length for each in ranges)
        sends = self._sources(f"{use} sent", dtype, ranges)
        own = sends[self.rank]
        lengths = [0 if rank == self.rank else own.size for rank in range(self.size)]
        arrived = split(self._stage(f"{use} arrived", dtype, sum(lengths)), lengths)
        started = self._collectives.exchange(_bytes(sends), _bytes(arrived), longest * dtype.itemsize)
        arrived[self.rank] = own
        return _Contributions(started, arrived)

    # Reductions

    def allreduce(self, inputs: Vectors, outputs: Vectors, op: ReduceOp, prescale: float, postscale: float) -> None:
        source, target = source_and_target(inputs, outputs)
        length = source.length
        if not length:
            return
        dtype = source.dtype
        nbytes = length * dtype.itemsize
        excess = (self.size - 1) * nbytes * (self.size - 2) // self.size
        if nbytes <= DIRECT_BYTES and excess <= DIRECT_EXCESS_BYTES:
            (own,) = self._sources("own", dtype, [Range.of(source)])
            lengths = [0 if rank == self.rank else length for rank in range(self.size)]
            vectors = split(self._stage("vectors", dtype, sum(lengths)), lengths)
            self._collectives.wait(self._collectives.gather(own.view(np.uint8), _bytes(vectors), nbytes))
            vectors[self.rank] = own
            target.reduce(0, length, vectors, op, prescale, postscale, self._workspace)
            return
        share = max(1, self._piece_bytes // dtype.itemsize // self.size)
        step = share * self.size
        pieces = -(-length // step)

        def bounds(index: int) -> list[int]:
            """The first elements of the ranks' shares of a piece, and the piece's end."""
            start = index * step
            each = -(-min(step, length - start) // self.size)
            return [min(start + rank * each, start + step, length) for rank in range(self.size + 1)]

        def ranges(spans: Spans, index: int) -> list[Range]:
            at = bounds(index)
            return [Range(spans, at[rank], at[rank + 1]) for rank in range(self.size)]

        def exchange(index: int) -> _Contributions:
            return self._contributions(f"{index % 2}", dtype, ranges(source, index))

        def reduce(index: int, contributions: _Contributions) -> _Receipt:
            self._collectives.wait(contributions.started)
            shares = ranges(target, index)
            own = shares[self.rank]
            ((result,), apart) = self._arrays(f"{index % 2} result", dtype, [own])
            reduce_into(result, contributions.arrays, op, prescale, postscale, self._workspace)
            if apart:
                own.write(result)
            return self._gather(f"{index % 2} results", result, shares)

        contributions, gathering = exchange(0), None
        for index in range(pieces):
            following = exchange(index + 1) if index + 1 < pieces else None
            results = reduce(index, contributions)
            if gathering is not None:
                self._finish(gathering)
            if following is not None:
                contributions = following
            gathering = results
        assert gathering is not None
        self._finish(gathering)

    def allreduce_compressed(
        self, inputs: Vectors, outputs: Vectors, prescale: float, postscale: float, form: BlockFormat, errors: Errors
    ) -> None:
        source, target = source_and_target(inputs, outputs)
        coder, size, rank = self._coders.of(form), self.size, self.rank
        elements = self._piece_bytes // source.dtype.itemsize // size
        reduction = BlockReduction(coder, size, source, target, prescale, postscale, errors, elements)
        byte = np.dtype(np.uint8)

        def packed(use: str, index: int, owners: Iterable[int]) -> list[Array]:
            lengths = [reduction.nbytes(reduction.piece(owner, index)) for owner in owners]
            return split(self._stage(f"{index % 2} {use}", byte, sum(lengths)), lengths)

        def start(index: int) -> _Contributions:
            sends = packed("packed", index, range(size))
            for peer in range(size):
                if peer != rank and sends[peer].size:
                    reduction.contribute(reduction.piece(peer, index), sends[peer])
            arrived = packed("packed arrived", index, [rank] * size)
            started = self._collectives.exchange(sends, arrived, max(map(len, [*sends, *arrived])))
            return _Contributions(started, arrived)

        def finish(index: int, contributions: _Contributions) -> None:
            self._collectives.wait(contributions.started)
            results = packed("packed results", index, range(size))
            if results[rank].size:
                others = [each for peer, each in enumerate(contributions.arrays) if peer != rank]
                reduction.reduce(reduction.piece(rank, index), others, results[rank])
            self._collectives.wait(self._collectives.gather(results[rank], results, max(map(len, results))))
            for peer in range(size):
                if peer != rank and results[peer].size:
                    reduction.finish(reduction.piece(peer, index), results[peer])

        _in_turns(reduction.rounds, start, finish)

    def reducescatter(
        self,
        inputs: Vectors,
        outputs: Vectors,
        counts: Sequence[Sequence[int]],
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> None:
        sources, targets = arrays_of(inputs), arrays_of(outputs)
        if not sources:
            return
        dtype, target = sources[0].dtype, spans_of(targets)
        shards = [Range.of(views) for views in split_by_rank(sources, counts)]
        step = max(1, self._piece_bytes // dtype.itemsize // self.size)

        def start(index: int) -> _Contributions:
            return self._contributions(f"{index % 2}", dtype, [shard.piece(index, step) for shard in shards])

        def finish(index: int, contributions: _Contributions) -> None:
            self._collectives.wait(contributions.started)
            begin, end = min(index * step, target.length), min((index + 1) * step, target.length)
            target.reduce(begin, end, contributions.arrays, op, prescale, postscale, self._workspace)

        _in_turns(-(-max(shard.length for shard in shards) // step), start, finish)

    # Movements

    def allgather(self, inputs: Vectors, outputs: Vectors, counts: Sequence[Sequence[int]]) -> None:
        source = spans_of(inputs)
        targets = [Range.of(views) for views in split_by_rank(arrays_of(outputs), counts)]
        longest = max((target.length for target in targets), default=0)
        if not longest:
            return
        dtype = source.dtype
        step = max(1, self._moved_bytes // dtype.itemsize // self.size)

        def start(index: int) -> _Receipt:
            ranges = [target.piece(index, step) for target in targets]
            own = ranges[self.rank]
            (array,) = self._sources(f"{index % 2} own", dtype, [own._replace(spans=source)])
            own.write(array)
            return self._gather(f"{index % 2} results", array, ranges)

        _in_turns(-(-longest // step), start, lambda index, receipt: self._finish(receipt))

    def broadcast(self, vectors: Vectors, root: int) -> None:
        for array in arrays_of(vectors):
            step = max(1, self._moved_bytes // array.itemsize)

            def start(index: int, array: Array = array, step: int = step) -> Any:
                part = array[index * step : (index + 1) * step]
                return self._collectives.broadcast(part.view(np.uint8), root)

            _in_turns(-(-array.size // step), start, lambda index, started: self._collectives.wait(started))

    def alltoall(
        self, source: Vectors, target: Vectors, sent: Sequence[int], received: Sequence[int], longest: int
    ) -> None:
        outgoing, incoming = parts_of(source, sent), parts_of(target, received)
        itemsize = outgoing[0].itemsize
        step = max(1, self._moved_bytes // itemsize // self.size)
        incoming[self.rank][:] = outgoing[self.rank]

        def start(index: int) -> Any:
            def parts(arrays: Sequence[Array]) -> list[Array]:
                return _bytes([array[index * step : (index + 1) * step] for array in arrays])

            return self._collectives.exchange(
                parts(outgoing), parts(incoming), min(step, longest - index * step) * itemsize
            )

        _in_turns(-(-longest // step), start, lambda index, started: self._collectives.wait(started))

    def barrier(self) -> None:
        arrived = np.zeros(self.size, np.uint8)
        self._collectives.wait(self._collectives.gather(np.zeros(1, np.uint8), split(arrived, [1] * self.size), 1))

    def abort(self) -> None:
        self._collectives.abort()

    def may_still_write(self) -> bool:
        return self._collectives.may_still_write()

    def descriptors(self) -> list[int]:
        return self._collectives.descriptors()

    def close(self) -> None:
        self._collectives.close()


class _Contributions(NamedTuple):
    """All ranks' contributions to this rank's range, by rank: ``arrays`` hold them after waiting for ``started``."""

    started: Any
    arrays: Sequence[Array]


def _in_turns(count: int, start: Callable[[int], Any], finish: Callable[[int, Any], None]) -> None:
    """Carry out ``count`` steps as a pipeline: step i + 1 is started before step i is finished.

    Args:
        start: starts the step of an index.
        finish: takes the index and the result of ``start``, and finishes that step.
    """
    pending = start(0) if count else None
    for index in range(count):
        following = start(index + 1) if index + 1 < count else None
        finish(index, pending)
        pending = following
