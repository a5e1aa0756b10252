"""Every collective over a transport that moves bytes between any two ranks: what ``tcp`` and ``mpi`` have in common.

An allreduce takes one of three ways (:class:`Way`), by the number of ranks and bytes. Every element is combined in the tree of
:mod:`horovod.comm.reduction` on all ways, so the way never changes a result. A reducescatter and a compressed allreduce stream
through ``comm.exchange.sharded_reduction``. Other collectives move data directly between the callers' arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any

import numpy as np

from horovod.comm.base import Communicator
from horovod.comm.compression.block_reduction import BlockReduction, Errors
from horovod.comm.compression.blocks import BlockCoders, BlockFormat
from horovod.comm.datatypes import Array
from horovod.comm.exchange.base import CollectiveKind, PeerExchange
from horovod.comm.exchange.compressed_pieces import CompressedPieces
from horovod.comm.exchange.plain_pieces import PlainPieces
from horovod.comm.exchange.reduction_memory import Staging, as_bytes
from horovod.comm.exchange.sharded_reduction import PieceSource, ShardedReduction
from horovod.comm.exchange.tree_reduction import MESSAGE_BYTES, TreeReduction
from horovod.comm.ranges import Range, parts_of, split_by_rank
from horovod.comm.reduction import ReduceOp, Workspace, reduce_into
from horovod.comm.spans import Spans, Vectors, arrays_of, source_and_target

PIECE_BYTES = 512 << 10
"""The usual size of a piece. Measured between 2 ranks of one host: half and four times this size are slower."""
DIRECT_BYTES = 256 << 10
"""The largest allreduce in which each rank sends its whole vector to every other rank: one latency instead of two. Measured
between 2 ranks of one host: 256 KB take 50 us whole, and 110 us in shards."""
DIRECT_EXCESS_BYTES = 32 << 10
"""The most bytes that a rank may send in such an allreduce beyond those of an allreduce in shards: more bytes cost more than
the latency that they save."""
FEW_RANKS = 8
"""Among at most so many ranks, each sends messages to all others in every allreduce: they cost no more than the latencies of a
tree."""
TREE_BYTES = 8 << 20
"""How many bytes are reduced in a tree at a time, which bounds its staging memory."""
RELAY_BYTES = 256 << 10
"""How many bytes a rank passes on at a time in a broadcast."""


class Way(Enum):
    """How an allreduce is carried out."""

    DIRECT = auto()
    """Each rank sends its whole vector to every other rank, and reduces all vectors: one latency."""
    TREE = auto()
    """A number of messages that grows with the logarithm of the ranks (``comm.exchange.tree_reduction``)."""
    SHARDS = auto()
    """Each rank reduces one shard, for which it exchanges messages with every other rank (``comm.exchange.sharded_reduction``):
    the fewest bytes."""


def way_of(size: int, nbytes: int, message_bytes: int = MESSAGE_BYTES) -> Way:
    """How ``size`` ranks carry out an allreduce of ``nbytes``; the same on all of them.

    Args:
        message_bytes: shards of at least so many bytes are worth a message each.
    """
    if size > FEW_RANKS:
        return Way.TREE if nbytes < size * message_bytes else Way.SHARDS
    excess = (size - 1) * nbytes * (size - 2) // size
    return Way.DIRECT if nbytes <= DIRECT_BYTES and excess <= DIRECT_EXCESS_BYTES else Way.SHARDS


class ExchangeCommunicator(Communicator):
    """One rank of a group.

    Args:
        rank, size: this rank's index in the group, and the size of the group.
        exchange: the transport to every other rank, which this object owns from now on.
        piece_bytes: bytes that a rank sends to one other rank at a time while a reduction streams; the same on all ranks.
        relays: whether two ranks broadcast in pieces, too, so that a transport with several connections to a peer uses all of
            them; the same on all ranks.
        message_bytes: how many bytes cost as much as a message; the same on all ranks.
        between_hosts: whether some ranks are on other hosts, so that compression may pay; the same on all ranks.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        exchange: PeerExchange[Any],
        piece_bytes: int = PIECE_BYTES,
        relays: bool = False,
        message_bytes: int = MESSAGE_BYTES,
        between_hosts: bool = False,
    ) -> None:
        super().__init__(rank, size)
        self.compresses = between_hosts
        self._coders = BlockCoders()
        self._relays = relays
        self._piece_bytes = piece_bytes
        self._exchange = exchange
        # Start with the next rank, so that not every rank sends to rank 0 first.
        self._peers = [(rank + distance) % self.size for distance in range(1, self.size)]
        self._workspace = Workspace()
        self._staging = Staging()
        self._message_bytes = message_bytes
        self._tree = TreeReduction(exchange, self._staging, rank, size, message_bytes)

    # Reductions

    def allreduce(self, inputs: Vectors, outputs: Vectors, op: ReduceOp, prescale: float, postscale: float) -> None:
        self._exchange.begin(CollectiveKind.ALLREDUCE)
        source, target = source_and_target(inputs, outputs)
        length = source.length
        if not length:
            return
        dtype = source.dtype
        way = way_of(self.size, length * dtype.itemsize, self._message_bytes)
        if way is Way.TREE:
            step = TREE_BYTES // dtype.itemsize
            for start in range(0, length, step):
                stop = min(start + step, length)
                self._tree.run(Range(source, start, stop), Range(target, start, stop), op, prescale, postscale)
            return
        combine = self._arithmetic(op, prescale, postscale)
        if way is Way.DIRECT:
            self._allreduce_direct(source, target, dtype, combine)
            return
        step = self._piece_bytes // dtype.itemsize
        bounds = [length * r // self.size for r in range(self.size + 1)]
        shares = [Range(source, bounds[r], bounds[r + 1]) for r in range(self.size)]
        results = [Range(target, bounds[r], bounds[r + 1]) for r in range(self.size)]
        self._run(PlainPieces(self._staging, self.rank, dtype, step, shares, results[self.rank], results, combine))

    def _run(self, pieces: PieceSource) -> None:
        ShardedReduction(self._exchange, self.rank, self.size, pieces).run()

    def allreduce_compressed(
        self, inputs: Vectors, outputs: Vectors, prescale: float, postscale: float, form: BlockFormat, errors: Errors
    ) -> None:
        self._exchange.begin(CollectiveKind.ALLREDUCE)
        source, target = source_and_target(inputs, outputs)
        coder, size = self._coders.of(form), self.size
        reduction = BlockReduction(coder, size, source, target, prescale, postscale, errors)
        self._run(CompressedPieces(self._staging, self.rank, size, reduction))

    def _allreduce_direct(
        self,
        source: Spans,
        target: Spans,
        dtype: np.dtype[Any],
        combine: Callable[[Array, Sequence[Array]], None],
    ) -> None:
        """Carry out an allreduce on the way ``DIRECT``."""
        exchange, length = self._exchange, source.length
        contributions = [self._staging.array("direct", 0, r, dtype, length) for r in range(self.size)]
        own = source.whole(0, length)
        if own is None:
            own = contributions[self.rank]
            source.read(0, length, own)
        else:
            contributions[self.rank] = own
        data = as_bytes(own)
        marks = [exchange.send(r, data) for r in self._peers]
        marks += [exchange.receive(r, as_bytes(contributions[r])) for r in self._peers]
        exchange.wait(marks)  # also for the sent data, since the result may overwrite it
        result = target.whole(0, length)
        if result is not None:
            combine(result, contributions)
        else:
            result = self._staging.array("direct", 0, self.rank, dtype, length)
            combine(result, contributions)
            target.write(0, length, result)

    def reducescatter(
        self,
        inputs: Vectors,
        outputs: Vectors,
        counts: Sequence[Sequence[int]],
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> None:
        self._exchange.begin(CollectiveKind.REDUCESCATTER)
        sources, targets = arrays_of(inputs), arrays_of(outputs)
        if not sources:
            return
        dtype = sources[0].dtype
        step = self._piece_bytes // dtype.itemsize
        shares = [Range.of(views) for views in split_by_rank(sources, counts)]
        own = Range.of(targets)
        combine = self._arithmetic(op, prescale, postscale)
        self._run(PlainPieces(self._staging, self.rank, dtype, step, shares, own, [], combine))

    def _arithmetic(self, op: ReduceOp, prescale: float, postscale: float) -> Callable[[Array, Sequence[Array]], None]:
        workspace = self._workspace
        return lambda target, contributions: reduce_into(target, contributions, op, prescale, postscale, workspace)

    # Movements

    def allgather(self, inputs: Vectors, outputs: Vectors, counts: Sequence[Sequence[int]]) -> None:
        exchange = self._exchange
        exchange.begin(CollectiveKind.ALLGATHER)
        sources, targets = arrays_of(inputs), arrays_of(outputs)
        if not sources:
            return
        parts = split_by_rank(targets, counts)
        data = [as_bytes(source) for source in sources]
        marks = [exchange.send(r, *data) for r in self._peers]
        marks += [exchange.receive(r, *map(as_bytes, parts[r])) for r in self._peers]
        for source, part in zip(sources, parts[self.rank], strict=True):
            np.copyto(part, source)
        exchange.wait(marks)

    def broadcast(self, vectors: Vectors, root: int) -> None:
        for array in arrays_of(vectors):
            self._broadcast(array, root)

    def _broadcast(self, array: Array, root: int) -> None:
        exchange = self._exchange
        exchange.begin(CollectiveKind.BROADCAST)
        if not array.size:
            return
        data = as_bytes(array)
        step = RELAY_BYTES if self._relays or self.size > 2 else data.nbytes
        pieces = [data[begin : begin + step] for begin in range(0, data.nbytes, step)]
        parent, children = self._position_in_tree(root, chain=len(pieces) > 1)
        arrivals = [] if parent is None else [exchange.receive(parent, piece) for piece in pieces]
        marks = []
        for index, piece in enumerate(pieces):
            if arrivals:
                exchange.wait([arrivals[index]])
            marks += [exchange.send(child, piece) for child in children]
        exchange.wait(marks)

    def _position_in_tree(self, root: int, chain: bool) -> tuple[int | None, list[int]]:
        """The rank from which this rank receives a broadcast (None on the root), and the ranks to which it sends it.

        A chain has the highest bandwidth, since no rank sends twice; a binomial tree takes the fewest steps.
        """
        position, size = (self.rank - root) % self.size, self.size
        if chain:
            above = position - 1 if position else None
            below = [position + 1] if position + 1 < size else []
        else:
            span = 1  # the subtree of ``position`` covers the positions up to position + span
            while span < size and not position & span:
                span *= 2
            above = position - span if position else None
            below = []
            while span > 1:
                span //= 2
                if position + span < size:
                    below.append(position + span)
        return None if above is None else (above + root) % size, [(child + root) % size for child in below]

    def alltoall(
        self, source: Vectors, target: Vectors, sent: Sequence[int], received: Sequence[int], longest: int
    ) -> None:
        exchange = self._exchange
        exchange.begin(CollectiveKind.ALLTOALL)
        outgoing, incoming = parts_of(source, sent), parts_of(target, received)
        marks = [exchange.send(rank, as_bytes(outgoing[rank])) for rank in self._peers]
        marks += [exchange.receive(rank, as_bytes(incoming[rank])) for rank in self._peers]
        np.copyto(incoming[self.rank], outgoing[self.rank])
        exchange.wait(marks)

    def barrier(self) -> None:
        """A dissemination barrier: after step j = 0, 1, ... every rank has heard, directly or through others, from the
        2**(j + 1) - 1 ranks before it."""
        exchange = self._exchange
        exchange.begin(CollectiveKind.BARRIER)
        distance = 1
        while distance < self.size:
            sent = exchange.send((self.rank + distance) % self.size)
            exchange.wait([sent, exchange.receive((self.rank - distance) % self.size)])
            distance *= 2

    def abort(self) -> None:
        self._exchange.abort()

    def may_still_read(self) -> bool:
        return self._exchange.may_still_read()

    def may_still_write(self) -> bool:
        return self._exchange.may_still_write()

    def descriptors(self) -> list[int]:
        return self._exchange.descriptors()

    def close(self) -> None:
        self._exchange.close()
