"""Collectives of large tensors on one host: every rank reads the data that it needs directly from the other ranks' memory.

No data is copied to shared memory, so each byte is copied at most once before it is folded. The ranks wait for each other two
or three times in a collective of any size, not for every piece. An allreduce::

    exchange   every rank sends its tensors' addresses, and whether others can read them; if some cannot be read, stop here
    reduce     read the others' parts of my shard, some hundred kilobytes at a time, and reduce them with mine
    exchange   every rank has reduced its shard, and no rank reads the others' parts any more
    gather     read the others' shards into my tensors
    exchange   no rank reads my tensors any more

Small tensors do not gain: each page costs the kernel as much as copying a few kilobytes. Huge pages cost little.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Sequence

import numpy as np

from horovod.comm.base import PeerFailure
from horovod.comm.datatypes import Array
from horovod.comm.ranges import shard_bounds
from horovod.comm.reduction import HALVES, ReduceOp, Workspace, reduce_into
from horovod.comm.shm import cross_memory
from horovod.comm.shm.cross_memory import copy_plan
from horovod.comm.shm.futex_words import WORD_BYTES
from horovod.comm.spans import IOVEC_BYTES, Layout, Spans, address_of, spans_of

_log = logging.getLogger(__name__)

ExchangeFunction = Callable[[Array], list[Array]]
"""All-gathers a vector of 64-bit words; returns all ranks' vectors, by rank."""

_FOLDED = 1 << 20
_FOLDED_AT_LEAST = 512 << 10
_FOLDED_AT_MOST = 8 << 20
"""Bytes to read before folding them, few enough to stay in the cache: the usual total from all other ranks, the minimum from
each, and the maximum total with many ranks, which limits that minimum."""


def folded_bytes(peers: int) -> int:
    """The number of bytes to read from each of ``peers`` ranks before they are folded."""
    return max(_FOLDED // peers, min(_FOLDED_AT_LEAST, _FOLDED_AT_MOST // peers))


_SCALED = 256 << 10
"""Bytes to fold at a time if they are also scaled: so few stay in a cache nearer to the core."""

_READ = 8 << 20
"""Bytes to read at a time if nothing is folded. A rank notices an abort between two reads."""

NOTHING: Array = np.empty(0, np.uintp)
"""The empty vector: an exchange of it only makes the ranks wait for each other."""


def exchange_rank_infos(rank: int, exchange: ExchangeFunction) -> list[int] | None:
    """Check whether the ranks of a group can read one another's memory. Every rank must call it.

    Args:
        rank: this rank's index in the group.
        exchange: all-gathers words among the same ranks.

    Returns:
        The process ids by rank; None, on all ranks, if some rank cannot read another one's memory.
    """
    token = np.frombuffer(os.urandom(2 * WORD_BYTES), np.uintp)
    process = os.getpid() if cross_memory.available else 0
    cross_memory.permit_siblings()
    cards = exchange(np.array([process, address_of(token), *token], np.uintp))
    obstacle = "" if process else "the system does not support it"
    found = np.empty_like(token)
    for peer, card in enumerate(cards):
        if not process or peer == rank:
            continue
        try:
            theirs, mine = _iovec(int(card[1]), found.nbytes), _iovec(address_of(found), found.nbytes)
            cross_memory.read(int(card[0]), found.nbytes, address_of(theirs), 1, address_of(mine), 1)
        except OSError as error:
            obstacle = f"rank {peer} of the group: {error.strerror or error}"
            break
        if (found != card[2:]).any():
            obstacle = f"the process id of rank {peer} of the group belongs to another process here"
            break
    able = [bool(answer[0]) for answer in exchange(np.array([not obstacle], np.uintp))]
    if all(able):
        return [int(card[0]) for card in cards]
    if obstacle:
        _log.info("large tensors go through shared memory: this rank cannot read other ranks' memory (%s)", obstacle)
    return None


def _iovec(address: int, nbytes: int) -> Array:
    return np.array([[address, nbytes]], np.uintp)


class DirectCollectives:
    """The collectives of one rank. Every rank must call each of them. If the tensors of some rank cannot be read by the others,
    a collective does nothing and returns False on all ranks.

    Args:
        rank: this rank's index in the group.
        processes: the ranks' process ids, as :func:`exchange_rank_infos` returned them.
        exchange: all-gathers words among the same ranks.
        advance: called before each read; shows the others that this rank makes progress, and raises after an abort.
        workspace: scratch memory of the worker thread.
    """

    def __init__(
        self,
        rank: int,
        processes: Sequence[int],
        exchange: ExchangeFunction,
        advance: Callable[[], None],
        workspace: Workspace,
    ) -> None:
        self._rank = rank
        self._size = len(processes)
        self._processes = processes
        self._peers = [(rank + distance) % self._size for distance in range(1, self._size)]
        self._folded_bytes = folded_bytes(len(self._peers))
        self._exchange = exchange
        self._advance = advance
        self._workspace = workspace

    def allreduce(self, source: Spans, target: Spans, op: ReduceOp, prescale: float, postscale: float) -> bool:
        layout, count = source.layout, len(source)
        tables = self._tell(source, target)
        if tables is None:
            return False
        bounds = shard_bounds(source.length, self._size)
        self._fold(
            tables[:, :count], source, target, bounds[self._rank], bounds[self._rank + 1], op, prescale, postscale
        )
        self._exchange(NOTHING)
        for peer in self._peers:
            self._gather(peer, tables[peer][count:], layout, target.table(), bounds[peer], bounds[peer + 1])
        self._exchange(NOTHING)
        return True

    def reducescatter(
        self, shards: Sequence[Spans], target: Spans, op: ReduceOp, prescale: float, postscale: float
    ) -> bool:
        """Reduce this rank's shard into ``target``.

        Args:
            shards: by rank, the parts of this rank's vectors that belong to that rank.
        """
        tables = self._tell(*shards)
        if tables is None:
            return False
        inputs = tables.reshape(self._size, self._size, -1)[:, self._rank]
        self._fold(inputs, shards[self._rank], target, 0, target.length, op, prescale, postscale)
        self._exchange(NOTHING)
        return True

    def allgather(self, source: Spans, targets: Sequence[Spans]) -> bool:
        """Copy all ranks' vectors.

        Args:
            source: this rank's vectors.
            targets: by rank, the memory for that rank's vectors.
        """
        tables = self._tell(source)
        if tables is None:
            return False
        for run, into in zip(source.arrays(), targets[self._rank].arrays(), strict=True):
            self._advance()
            np.copyto(into, run)
        for peer in self._peers:
            self._gather_all(peer, tables[peer], targets[peer])
        self._exchange(NOTHING)
        return True

    def broadcast(self, array: Array, root: int) -> bool:
        mine = spans_of([array])
        tables = self._tell(mine)
        if tables is None:
            return False
        if self._rank != root:
            self._gather_all(root, tables[root], mine)
        self._exchange(NOTHING)
        return True

    def alltoall(self, parts: Sequence[Array], targets: Sequence[Array]) -> bool:
        """Move data between ranks; the caller copies the data for this rank itself.

        Args:
            parts: by rank, this rank's data for that rank.
            targets: by rank, the memory for that rank's data.
        """
        tables = self._tell(spans_of(parts))
        if tables is None:
            return False
        for peer in self._peers:
            self._gather_all(peer, tables[peer][self._rank : self._rank + 1], spans_of([targets[peer]]))
        self._exchange(NOTHING)
        return True

    def _tell(self, *vectors: Spans) -> Array | None:
        """All-gather the addresses of the vectors.

        Returns:
            All ranks' addresses, one row per rank; None, on all ranks, if some rank's memory cannot be read by the others.
        """
        tables, lengths = [], []
        for each in vectors:
            tables.append(each.table())
            lengths.append(each.layout.lengths)
        addresses = np.concatenate(tables)
        there = addresses[np.concatenate(lengths) > 0]
        answers = np.array(self._exchange(np.insert(addresses, 0, cross_memory.readable(there))))
        return answers[:, 1:] if answers[:, 0].all() else None

    def _fold(
        self,
        inputs: Array,
        source: Spans,
        target: Spans,
        start: int,
        stop: int,
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> None:
        """Reduce elements ``[start, stop)`` of all ranks' vectors into the same elements of ``target``.

        Args:
            inputs: the addresses of all ranks' vectors, one row per rank.
            source: this rank's vectors.
        """
        dtype, rank = source.dtype, self._rank
        plan = copy_plan(source.layout, start, stop, self._folded_bytes)
        iovecs = {peer: plan.iovecs(inputs[peer]) for peer in self._peers}
        longest = plan.longest
        buffers = [self._workspace.array(3 + peer, dtype, longest) for peer in range(self._size)]
        into = np.array([[address_of(buffer), 0] for buffer in buffers], np.uintp)
        # Folding 16-bit floats is faster into memory that is not one of the contributions.
        aside = dtype in HALVES and target is source
        most = longest if postscale == 1.0 else _SCALED // dtype.itemsize
        for step in plan.steps:
            into[:, 1] = step.nbytes
            for peer in self._peers:
                self._read(peer, step.nbytes, iovecs[peer], step.first, len(step.runs), into, peer, 1)
            position = 0
            for vector, begin, end in step.runs:
                for low in range(begin, end, most):
                    high = min(low + most, end)
                    contributions = [buffer[position : position + high - low] for buffer in buffers]
                    contributions[rank] = source.part(vector, low, high)
                    result = contributions[rank] if target is source else target.part(vector, low, high)
                    folded = buffers[rank][: high - low] if aside else result
                    reduce_into(folded, contributions, op, prescale, postscale, self._workspace)
                    if aside:
                        np.copyto(result, folded)
                    position += high - low

    def _gather_all(self, peer: int, theirs: Array, target: Spans) -> None:
        self._gather(peer, theirs, target.layout, target.table(), 0, target.length)

    def _gather(self, peer: int, theirs: Array, layout: Layout, mine: Array, start: int, stop: int) -> None:
        """Read elements ``[start, stop)`` of a peer's vectors into this rank's.

        Args:
            theirs, mine: the addresses of the peer's vectors and of this rank's.
            layout: that of both.
        """
        plan = copy_plan(layout, start, stop, _READ)
        iovecs, into = plan.iovecs(theirs), plan.iovecs(mine)
        for step in plan.steps:
            self._read(peer, step.nbytes, iovecs, step.first, len(step.runs), into, step.first, len(step.runs))

    def _read(
        self,
        peer: int,
        nbytes: int,
        iovecs: Array,
        first: int,
        count: int,
        into: Array,
        into_first: int,
        into_count: int,
    ) -> None:
        self._advance()
        try:
            cross_memory.read(
                self._processes[peer],
                nbytes,
                address_of(iovecs) + first * IOVEC_BYTES,
                count,
                address_of(into) + into_first * IOVEC_BYTES,
                into_count,
            )
        except OSError as error:
            if error.errno == errno.ESRCH:
                raise PeerFailure(peer, "its process has ended", suspected=True) from None
            raise PeerFailure(
                peer,
                f"its tensor cannot be read, or this rank's tensor cannot be written: {error.strerror or error}."
                " Was a tensor resized or freed during the collective?",
                suspected=True,
            ) from None
