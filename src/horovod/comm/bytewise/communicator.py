"""Every collective of the contract over a library of collectives on bytes: what ``gloo`` and ``ccl`` have in common.

The library carries, and Horovod reduces. So all data types work, 16-bit floats accumulate in 32 bits, every element is
reduced in rank order, and results have the same bits as with Horovod's own engines. An allreduce of a piece is

    alltoall    each rank gets everybody's contribution to its share of the piece
    reduce      in rank order
    allgather   of the shares

which moves as many bytes as a ring does. The next piece is under way while one is reduced. Everything passes through pieces of
memory that belong to the engine: what a library may still touch after an abort is never a tensor, and no count grows
    with tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod.comm.base import Communicator
from horovod.comm.bytewise.base import ByteCollectives
from horovod.comm.datatypes import Array
from horovod.comm.reduction import ReduceOp, Workspace, reduce_into
from horovod.comm.segments import Segments, source_and_target, split, split_by_rank
from horovod.comm.spans import Vectors, arrays_of

PIECE_BYTES = 4 << 20
"""Bytes of a batch that one rank contributes at a time."""

DIRECT_BYTES = 16 << 10
"""The largest reduction of which every rank gets all contributions: one collective instead of two."""


def _bytes(array: Array) -> Array:
    return array.view(np.uint8)


class BytewiseCommunicator(Communicator):
    """One rank of a group.

    Args:
        collectives: of the same group. Owned from now on.
        piece_bytes: the same on all ranks.
    """

    def __init__(self, rank: int, size: int, collectives: ByteCollectives, piece_bytes: int = PIECE_BYTES) -> None:
        super().__init__(rank, size)
        self._collectives = collectives
        self._piece_bytes = piece_bytes
        self._workspace = Workspace()
        self._memory: dict[str, Array] = {}

    def _stage(self, use: str, dtype: np.dtype[Any], length: int) -> Array:
        """Memory for one use at a time, kept for the next."""
        nbytes = length * dtype.itemsize
        memory = self._memory.get(use)
        if memory is None or memory.size < nbytes:
            memory = self._memory[use] = np.empty(nbytes, np.uint8)
        return memory[:nbytes].view(dtype)

    def _gather(self, own: Array, everybody: Array) -> None:
        self._collectives.wait(self._collectives.allgather(_bytes(own), _bytes(everybody)))

    # Reductions

    def allreduce(self, inputs: Vectors, outputs: Vectors, op: ReduceOp, prescale: float, postscale: float) -> None:
        source, target = source_and_target(inputs, outputs)
        if not source.length:
            return
        dtype = source.dtype
        if source.length * dtype.itemsize <= DIRECT_BYTES:
            own = self._stage("own", dtype, source.length)
            source.read(0, source.length, own)
            everybody = self._stage("everybody", dtype, source.length * self.size)
            self._gather(own, everybody)
            target.reduce(
                0, source.length, split(everybody, [own.size] * self.size), op, prescale, postscale, self._workspace
            )
            return
        _Allreduce(self, source, target, op, prescale, postscale).run()

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
        dtype, target = sources[0].dtype, Segments(targets)
        shards = [Segments(views) for views in split_by_rank(sources, counts)]
        step = max(1, self._piece_bytes // dtype.itemsize // self.size)
        for start in range(0, max(shard.length for shard in shards), step):
            sent = [max(0, min(step, shard.length - start)) for shard in shards]
            outgoing = self._stage("outgoing", dtype, sum(sent))
            for shard, part in zip(shards, split(outgoing, sent), strict=True):
                shard.read(start, start + part.size, part)
            length = sent[self.rank]
            incoming = self._stage("incoming", dtype, length * self.size)
            self._exchange(outgoing, incoming, sent, [length] * self.size, max(sent))
            if length:
                contributions = split(incoming, [length] * self.size)
                target.reduce(start, start + length, contributions, op, prescale, postscale, self._workspace)

    # Movements

    def _exchange(
        self, source: Array, target: Array, send_counts: Sequence[int], receive_counts: Sequence[int], longest: int
    ) -> None:
        self._collectives.wait(self.start_exchange(source, target, send_counts, receive_counts, longest))

    def start_exchange(
        self, source: Array, target: Array, send_counts: Sequence[int], receive_counts: Sequence[int], longest: int
    ) -> Any:
        """An alltoall of elements, started; no count on any rank is above ``longest``."""
        itemsize = source.itemsize
        return self._collectives.alltoall(
            _bytes(source),
            _bytes(target),
            [count * itemsize for count in send_counts],
            [count * itemsize for count in receive_counts],
            longest * itemsize,
        )

    def allgather(self, inputs: Vectors, outputs: Vectors, counts: Sequence[Sequence[int]]) -> None:
        source = Segments(inputs)
        targets = [Segments(views) for views in split_by_rank(arrays_of(outputs), counts)]
        longest = max((target.length for target in targets), default=0)
        if not longest:
            return
        dtype = source.dtype
        step = max(1, self._piece_bytes // dtype.itemsize // self.size)
        for start in range(0, longest, step):
            length = min(step, longest - start)  # of the rank that brings the most: the others fill up
            own, everybody = self._stage("own", dtype, length), self._stage("everybody", dtype, length * self.size)
            stop = min(start + length, source.length)
            if start < stop:
                source.read(start, stop, own[: stop - start])
            self._gather(own, everybody)
            for target, part in zip(targets, split(everybody, [length] * self.size), strict=True):
                stop = min(start + length, target.length)
                if start < stop:
                    target.write(start, stop, part[: stop - start])

    def broadcast(self, vectors: Vectors, root: int) -> None:
        for array in arrays_of(vectors):
            step = max(1, self._piece_bytes // array.itemsize)
            for start in range(0, array.size, step):
                part = array[start : start + step]
                data = self._stage("own", array.dtype, part.size)
                if self.rank == root:
                    data[:] = part
                self._collectives.wait(self._collectives.broadcast(_bytes(data), root))
                part[:] = data

    def alltoall(
        self, source: Vectors, target: Vectors, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> None:
        sent, received = arrays_of(source)[0], arrays_of(target)[0]
        outgoing, incoming = split(sent, send_counts), split(received, receive_counts)
        step = max(1, self._piece_bytes // sent.itemsize // self.size)
        # Nobody knows others' counts: each tells its largest.
        everybodys = self._stage("counts", np.dtype(np.int64), self.size)
        self._gather(np.array([max(send_counts)], np.int64), everybodys)
        longest = int(everybodys.max())
        for start in range(0, longest, step):
            parts = [part[start : start + step] for part in outgoing]
            packed = self._stage("outgoing", sent.dtype, sum(part.size for part in parts))
            np.concatenate(parts, out=packed)
            places = [part[start : start + step] for part in incoming]
            arrived = self._stage("incoming", sent.dtype, sum(place.size for place in places))
            sent_now, received_now = [part.size for part in parts], [place.size for place in places]
            self._exchange(packed, arrived, sent_now, received_now, min(step, longest - start))
            for place, part in zip(places, split(arrived, [place.size for place in places]), strict=True):
                place[:] = part

    def barrier(self) -> None:
        self._gather(np.zeros(1, np.uint8), np.empty(self.size, np.uint8))

    def abort(self) -> None:
        self._collectives.abort()

    def descriptors(self) -> list[int]:
        return self._collectives.descriptors()

    def close(self) -> None:
        self._collectives.close()

    # For _Allreduce

    def steps(self, dtype: np.dtype[Any]) -> tuple[int, int]:
        """Elements of a piece, which the ranks share evenly, and of a share."""
        share = max(1, self._piece_bytes // dtype.itemsize // self.size)
        return share * self.size, share

    def start_gather(self, own: Array, everybody: Array) -> Any:
        """An allgather of elements, started."""
        return self._collectives.allgather(_bytes(own), _bytes(everybody))

    def wait(self, started: Any) -> None:
        self._collectives.wait(started)

    stage = _stage

    @property
    def workspace(self) -> Workspace:
        return self._workspace


class _Allreduce:
    """One large allreduce, piece by piece; a piece's collectives run while its neighbours are packed, reduced and unpacked."""

    def __init__(
        self,
        engine: BytewiseCommunicator,
        source: Segments,
        target: Segments,
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> None:
        self._engine = engine
        self._source = source
        self._target = target
        self._arithmetic = op, prescale, postscale
        self._step, self._largest_share = engine.steps(source.dtype)

    def run(self) -> None:
        engine, pieces = self._engine, -(-self._source.length // self._step)
        contributions, results = self._exchange(0), None
        for index in range(pieces):
            following = self._exchange(index + 1) if index + 1 < pieces else None
            engine.wait(contributions)
            gathering = self._gather(index)
            if results is not None:
                self._unpack(index - 1, results)
            contributions, results = following, gathering
        self._unpack(pieces - 1, results)

    def _piece(self, index: int) -> tuple[int, int, int]:
        """Where it begins and ends, and how long a share of it is; the last share may be filled up."""
        start = index * self._step
        stop = min(start + self._step, self._source.length)
        return start, stop, -(-(stop - start) // self._engine.size)

    def _stage(self, use: str, index: int, length: int) -> Array:
        return self._engine.stage(f"{use} {index % 2}", self._source.dtype, length)

    def _exchange(self, index: int) -> Any:
        start, stop, share = self._piece(index)
        size = self._engine.size
        packed = self._stage("packed", index, share * size)
        self._source.read(start, stop, packed[: stop - start])
        arrived = self._stage("arrived", index, share * size)
        return self._engine.start_exchange(packed, arrived, [share] * size, [share] * size, share)

    def _gather(self, index: int) -> Any:
        """Reduce this rank's share of a piece, and start to gather all shares."""
        _, _, share = self._piece(index)
        size = self._engine.size
        result = self._stage("result", index, share)
        contributions = split(self._stage("arrived", index, share * size), [share] * size)
        reduce_into(result, contributions, *self._arithmetic, self._engine.workspace)
        return self._engine.start_gather(result, self._stage("results", index, share * size))

    def _unpack(self, index: int, gathering: Any) -> None:
        self._engine.wait(gathering)
        start, stop, share = self._piece(index)
        results = self._stage("results", index, share * self._engine.size)
        self._target.write(start, stop, results[: stop - start])
