"""A reduction of few bytes over a ``PeerExchange``: how ``comm.exchange.communicator`` carries out an allreduce among so many
ranks that a message to each would cost more than the bytes.

The ranks combine in the tree of :mod:`horovod.comm.reduction`. With ``2**levels`` the largest power of two that is not above
their number:

    pairs   if there are more ranks than that, of the first ones each two combine on the first, so that ``2**levels`` are left
    up      on level k, two ranks at distance ``2**k`` exchange partial results. Each gives one half of its range away and goes
            on with the other half (recursive halving). Ranges that fit into a message are exchanged whole (recursive doubling)
    down    the ranks that have shared a range exchange their halves of the result, the last ones first
    pairs   the first of a pair sends the result to the second

So a rank sends at most ``2 * levels + 1`` messages, and ``levels + 1`` if everything fits into one. Partial results of 16-bit
floats travel as float32, and results in their own type. Every element is combined in the same tree, whichever rank does it, so
neither halving nor the number of messages changes a bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod.comm.datatypes import Array
from horovod.comm.exchange.base import PeerExchange
from horovod.comm.exchange.reduction_memory import Staging, as_bytes
from horovod.comm.ranges import Range
from horovod.comm.reduction import ReduceOp, combine, enter, leave, partial_type

MESSAGE_BYTES = 32 << 10
"""The bytes that cost about as much as a message: 20 microseconds of a core, at the rate of a link of 10 Gbit/s."""


class TreeReduction:
    """One rank's place in the tree.

    Args:
        exchange: the transport to every other rank.
        staging: memory for partial results, and for data that is not contiguous.
        rank, size: this rank's index in the group, and the size of the group.
        message_bytes: the longest range that is exchanged whole; the same on all ranks.
    """

    def __init__(
        self, exchange: PeerExchange[Any], staging: Staging, rank: int, size: int, message_bytes: int = MESSAGE_BYTES
    ) -> None:
        self._exchange = exchange
        self._staging = staging
        self._message_bytes = message_bytes
        levels = size.bit_length() - 1
        pairs = size - (1 << levels)
        self._partner = rank ^ 1 if rank < 2 * pairs else None  # the other rank of this rank's pair
        self._second = self._partner is not None and rank % 2 == 1
        place = rank // 2 if rank < 2 * pairs else rank - pairs
        places = [place ^ (1 << level) for level in range(levels)]
        self._peers = [(2 * each if each < pairs else each + pairs, place < each) for each in places]

    def run(self, source: Range, target: Range, op: ReduceOp, prescale: float, postscale: float) -> None:
        """Carry out one allreduce, within a collective that has begun. Every rank must call it with matching arguments.

        Args:
            source, target: as long as each other; they may be the same memory.
            op, prescale, postscale: as :func:`~horovod.comm.reduction.reduce_into`.

        Raises:
            PeerFailure, Aborted: as :meth:`~horovod.comm.exchange.base.PeerExchange.wait`.
        """
        length, dtype = source.length, source.spans.dtype
        contribution = source.whole()
        if contribution is None:
            contribution = self._array("packed", dtype, length)
            source.read(contribution)
        partial = self._array("partial", partial_type(dtype), length)
        enter(contribution, partial, prescale)
        found = target.whole()
        result = self._array("result", dtype, length) if found is None else found
        if self._partner is not None and self._second:
            self._swap(self._partner, partial, result)
        else:
            self._reduce(partial, result, op, postscale)
        if found is None:
            target.write(result)

    def _reduce(self, partial: Array, result: Array, op: ReduceOp, postscale: float) -> None:
        """Take part in all levels: from this rank's contribution in ``partial``, which is overwritten, to the result."""
        arrived = self._array("arrived", partial.dtype, partial.size)
        if self._partner is not None:
            self._exchange.wait([self._exchange.receive(self._partner, as_bytes(arrived))])
            combine(op, partial, arrived, partial)
        halves: list[tuple[int, slice, slice]] = []
        own = slice(0, partial.size)
        for peer, lower in self._peers:
            kept = given = own
            if (own.stop - own.start) * partial.itemsize > self._message_bytes:
                middle = (own.start + own.stop) // 2
                kept, given = slice(own.start, middle), slice(middle, own.stop)
                if not lower:
                    kept, given = given, kept
                halves.append((peer, kept, given))
            mine, theirs = partial[kept], arrived[: kept.stop - kept.start]
            self._swap(peer, partial[given], theirs)
            first, second = (mine, theirs) if lower else (theirs, mine)
            combine(op, first, second, mine)
            own = kept
        leave(partial[own], result[own], postscale)
        for peer, kept, given in reversed(halves):
            self._swap(peer, result[kept], result[given])
        if self._partner is not None:
            self._exchange.wait([self._exchange.send(self._partner, as_bytes(result))])

    def _swap(self, peer: int, sent: Array, received: Array) -> None:
        """Send one array to a rank, and receive another from it."""
        exchange = self._exchange
        exchange.wait([exchange.send(peer, as_bytes(sent)), exchange.receive(peer, as_bytes(received))])

    def _array(self, use: str, dtype: np.dtype[Any], length: int) -> Array:
        return self._staging.array(f"tree: {use}", 0, 0, dtype, length)
