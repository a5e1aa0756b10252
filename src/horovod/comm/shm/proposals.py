"""Agreement on one collective of one host in a single step: all ranks write their requests, and one rank compares them.

An agreement by messages takes longer than a small collective. Here every rank writes a proposal into shared memory: its
request, byte by byte, and its contribution if that is small. The group's first rank, the leader, ends each try for all:
either the proposals are alike, and every rank computes the result from the contributions, or runs the collective with the
engine; or the try has failed, and every rank announces its request.

The proposals have their own shared memory, whichever engine the ranks have. It holds futex words, and two slots with a block
for every rank. Each word has one writer::

    proposal  of every rank: the number of the try that it takes part in
    outcome   of the leader: how many tries are over, times two, plus one if an odd number of them succeeded
    closed    of the leader: 1 while it does not use the fast path, so that no proposal can succeed
    given up  of every rank but the leader: the number of the last try that it has stopped waiting for

1. Try a+1 begins when try a is over.
2. A proposal cannot be withdrawn. Only the leader ends a try; a rank that has waited long enough sends a message that asks for
   it. It says so in *given up* first, and looks at the outcome once more. The leader looks at *given up* after it has written a
   success, and sends a message to each rank that does not wait. With a full fence between write and look on either side, the
   rank sees the success or the leader sees that it does not wait.
3. Contributions to success m are in slot m mod 2.
4. Success m needed a proposal of every rank, made when it had finished success m-1. So no rank still reads success m-1, whose
   slot the proposals for success m+1 are written to.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod.comm.datatypes import Array
from horovod.comm.reduction import ReduceOp, Workspace, reduce_into
from horovod.comm.shm.futex_words import CLOSED, GIVEN_UP, OUTCOME, PROPOSAL, FutexWords, fence, word_bytes, word_index
from horovod.comm.shm.memory import SharedMemory, in_pages
from horovod.comm.spans import Vectors, spans_of

_BLOCK_BYTES = 20 << 10
_HEAD_BYTES = 1 << 10
_NOTE_BYTES = 8


def memory_bytes(size: int) -> int:
    """How much memory the proposals of ``size`` ranks take. Pages that are never touched take none."""
    return in_pages(word_bytes(size)) + in_pages(2 * size * _BLOCK_BYTES)


def _block(memory: SharedMemory, slot: int, rank: int, size: int) -> Array:
    start = in_pages(word_bytes(size)) + (slot * size + rank) * _BLOCK_BYTES
    return memory.bytes[start : start + _BLOCK_BYTES]


def fits(identity: bytes, notes: Sequence[int]) -> bool:
    """Whether a proposal can hold the description of a collective and this rank's numbers."""
    return len(identity) + _NOTE_BYTES * len(notes) <= _HEAD_BYTES


class Proposals:
    """One rank's view of the proposals. Only one thread at a time may use it, except :meth:`over` and :meth:`closed`.

    Args:
        memory: of ``memory_bytes(size)`` bytes, mapped by every rank. This object owns it from now on.
        rank, size: this rank in the group; rank 0 is the leader.
        contributions: whether small contributions are part of a proposal; else the engine moves everything.

    Attributes:
        leads: whether this rank is the leader.
        data_bytes: how large a contribution may be.
    """

    def __init__(self, memory: SharedMemory, rank: int, size: int, contributions: bool = True) -> None:
        self.leads = rank == 0
        self.data_bytes = _BLOCK_BYTES - _HEAD_BYTES if contributions else 0
        self._memory = memory
        self._words = FutexWords(memory.words, memory.address, rank, size)
        self._rank = rank
        self._peers = [peer for peer in range(size) if peer != rank]
        self._proposal, self._outcome, self._closed = (
            word_index(rank, PROPOSAL),
            word_index(0, OUTCOME),
            word_index(0, CLOSED),
        )
        self._blocks = [[_block(memory, slot, each, size) for each in range(size)] for slot in range(2)]
        self._heads = [[block[:_HEAD_BYTES].data for block in row] for row in self._blocks]
        self._typed: dict[tuple[int, np.dtype[Any]], list[Array]] = {}
        self._workspace = Workspace()
        self._given_up = word_index(rank, GIVEN_UP)
        self._slot = 0
        self._told: dict[int, list[int]] = {peer: [] for peer in self._peers}

    # For every rank.

    def propose(self, identity: bytes, vectors: Vectors, notes: Sequence[int] = ()) -> int:
        """Take part in the present try, whose number is returned.

        Args:
            identity: the bytes that must be the same on all ranks; no identity may be a prefix of another.
            vectors: this rank's contribution, of one dtype, together at most ``data_bytes``; none if the engine is to move it.
            notes: numbers of this rank for the others, see :meth:`notes`. They and ``identity`` must fit (:func:`fits`).
        """
        outcome = self._words.values[self._outcome]
        number = (outcome >> 1) + 1
        self._slot = slot = ~outcome & 1  # this rank has taken part in every success so far
        if len(vectors) == 1:
            np.copyto(self._contributions((vector := vectors[0]).dtype)[self._rank][: vector.size], vector)
        elif vectors:
            source = spans_of(vectors)
            source.read(0, source.length, self._contributions(source.dtype)[self._rank][: source.length])
        head = self._heads[slot][self._rank]
        head[: len(identity)] = identity
        if notes:
            head[_HEAD_BYTES - _NOTE_BYTES * len(notes) :] = array("Q", notes).tobytes()
        self._words.publish(self._proposal, number)
        return number

    def closed(self) -> bool:
        """Whether the leader does not use the fast path. Ask after proposing, too: the leader may not have seen the
        proposal."""
        return bool(self._words.values[self._closed])

    def over(self, number: int) -> bool:
        """Whether the leader has ended the try."""
        return self._words.values[self._outcome] >> 1 >= number

    def succeeded(self) -> bool:
        """Whether the try of this rank's last proposal, which is :meth:`over`, succeeded."""
        self._words.read_fence()
        return self._words.values[self._outcome] & 1 == self._slot

    def await_outcome(self, number: int, spins: int, seconds: float) -> bool:
        """Whether the try is over. Polls ``spins`` times, then sleeps for at most ``seconds``."""
        return self._words.await_value(self._outcome, 2 * number, spins, seconds)

    def stop_waiting(self, number: int) -> bool:
        """Make the leader send a message if the try succeeds from now on. Returns whether it is over already."""
        self._words.publish(self._given_up, number)
        return self.over(number)

    def notes(self, count: int) -> tuple[tuple[int, ...], ...]:
        """After a success: the ``count`` notes of every rank, by rank."""
        notes = slice(_HEAD_BYTES - _NOTE_BYTES * count, _HEAD_BYTES)
        return tuple(tuple(head[notes].cast("Q")) for head in self._heads[self._slot])

    def reduce(self, outputs: Vectors, op: ReduceOp, prescale: float, postscale: float, first: int = 0) -> None:
        """After a success: reduce all contributions, from element ``first`` on, into ``outputs``, as an engine does."""
        if len(outputs) == 1:
            only = outputs[0]
            contributions = [each[first : first + only.size] for each in self._contributions(only.dtype)]
            reduce_into(only, contributions, op, prescale, postscale, self._workspace)
        elif outputs:
            target = spans_of(outputs)
            contributions = [each[first : first + target.length] for each in self._contributions(target.dtype)]
            target.reduce(0, target.length, contributions, op, prescale, postscale, self._workspace)

    def broadcast(self, outputs: Vectors, root: int) -> None:
        """After a success: copy the contribution of ``root`` into ``outputs``."""
        if outputs and root != self._rank:
            target = spans_of(outputs)
            target.write(0, target.length, self._contributions(target.dtype)[root][: target.length])

    def allgather(self, output: Array, counts: Sequence[int]) -> None:
        """After a success: concatenate all contributions, ``counts[r]`` elements of rank r, into ``output``."""
        start = 0
        for contribution, count in zip(self._contributions(output.dtype), counts, strict=True):
            output[start : start + count] = contribution[:count]
            start += count

    def alltoall(self, output: Array, counts: Sequence[Sequence[int]]) -> None:
        """After a success: concatenate the parts of all contributions that are for this rank into ``output``.

        Args:
            counts: ``counts[r][s]`` consecutive elements of rank r's contribution go to rank s.
        """
        start = 0
        for contribution, row in zip(self._contributions(output.dtype), counts, strict=True):
            begin, count = sum(row[: self._rank]), row[self._rank]
            output[start : start + count] = contribution[begin : begin + count]
            start += count

    # For the leader.

    def await_proposal(self, peer: int, number: int, spins: int, seconds: float) -> bool:
        """Whether a peer takes part in the try. Polls ``spins`` times, then sleeps for at most ``seconds``."""
        return self._words.await_value(word_index(peer, PROPOSAL), number, spins, seconds)

    def alike(self, peer: int, identity: bytes) -> bool:
        """Whether a peer that takes part has proposed the same as this rank."""
        self._words.read_fence()
        return bool(self._heads[self._slot][peer][: len(identity)] == identity)

    def decide(self, success: bool) -> list[int]:
        """End the present try; a success if all ranks take part and ask for the same.

        Returns:
            After a success, the peers that have stopped waiting and must be sent a message.
        """
        outcome = self._words.values[self._outcome]
        self._words.publish(self._outcome, (outcome + 2) ^ success)
        if not success:
            return []
        number = (outcome >> 1) + 1
        told = [peer for peer in self._peers if self._words.values[word_index(peer, GIVEN_UP)] == number]
        for peer in told:
            self._told[peer].append(number)
        return told

    def give_up(self, peer: int, number: int) -> bool:
        """A peer has given up a try: end the try if it is not over. Returns whether it had succeeded.

        Raises:
            ValueError: there has been no such try.
        """
        over = self._words.values[self._outcome] >> 1
        if not 0 < number <= over + 1:
            raise ValueError(f"try {number} of {over + 1}")
        if number > over:
            self.decide(False)
        succeeded = number in self._told[peer]
        self._told[peer] = [each for each in self._told[peer] if each > number]
        return succeeded

    def shut(self) -> None:
        """Close the fast path: no rank needs to wait for the leader."""
        if self._words.values[self._closed]:
            return
        self._words.values[self._closed] = 1
        fence()  # a peer that does not see this has made its proposal, which is seen here
        number = (self._words.values[self._outcome] >> 1) + 1
        if any(self._words.values[word_index(peer, PROPOSAL)] == number for peer in self._peers):
            self.decide(False)

    def reopen(self) -> None:
        """Open the fast path again."""
        self._words.values[self._closed] = 0

    def _contributions(self, dtype: np.dtype[Any]) -> list[Array]:
        key = (self._slot, dtype)
        found = self._typed.get(key)
        if found is None:
            found = [block[_HEAD_BYTES:].view(dtype) for block in self._blocks[self._slot]]
            self._typed[key] = found
        return found

    def descriptors(self) -> list[int]:
        """Open file descriptors, which a forked child must close."""
        return [self._memory.descriptor]

    def close(self) -> None:
        """Release the memory."""
        self._typed.clear()
        self._blocks.clear()
        self._heads.clear()
        self._words.release()
        self._memory.close()
