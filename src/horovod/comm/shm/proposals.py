"""Agreement on one collective of one host in a single step: all ranks write their requests, and one rank compares them.

An agreement by messages takes longer than a small collective. Here every rank writes a proposal into shared memory: the bytes
of its request, and its contribution if that is small. The group's first rank, the leader, ends each try for all ranks. If all
proposals are alike, the try succeeds: every rank computes the result from the contributions, or runs the collective with the
engine. Otherwise the try fails, and every rank announces its request.

The proposals have their own shared memory, whichever engine the ranks have. It holds futex words, and two slots with one block
per rank. Each word has one writer::

    proposal  of every rank: the number of the try that it takes part in; 0 on the leader if it has withdrawn
    outcome   of the leader: how many tries are over, times two, plus one if an odd number of them succeeded
    closed    of the leader: 1 while it does not use the fast path, so that no proposal can succeed
    given up  of every rank but the leader: the number of the last try that it has stopped waiting for

1. Try a+1 begins when try a is over.
2. Only the leader ends a try, and only the leader can withdraw its proposal. A try succeeds if all proposals are alike. The
   rank that proposes last sees that by itself: it reads the proposals of the others, and then that of the leader. The leader
   lets a try fail only after it has withdrawn its proposal and then read the others once more. Each side has a full fence
   between its write and its reads. So if a rank has seen all proposals, the leader sees them, too.
3. A rank that has waited long enough sends the leader a message that asks it to end the try. Before that, the rank writes
   *given up* and reads the outcome once more. The leader writes a success, then reads *given up*, and sends a message to each
   rank that has stopped waiting. Each side has a full fence between its write and its read. So the rank sees the success, or
   the leader sees that the rank has stopped waiting.
4. Contributions to success m are in slot m mod 2.
5. Success m needs a proposal of every rank, and a rank proposes only when it has finished success m-1. So after success m no
   rank still reads success m-1, and the proposals for success m+1 may use the same slot.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod.comm.datatypes import Array
from horovod.comm.ranges import parts_of
from horovod.comm.reduction import ReduceOp, Workspace, reduce_into
from horovod.comm.shm.completed_calls import CompletedCalls
from horovod.comm.shm.futex_words import CLOSED, GIVEN_UP, OUTCOME, PROPOSAL, FutexWords, fence, word_bytes, word_index
from horovod.comm.shm.shared_memory import SharedMemory, in_pages
from horovod.comm.spans import Vectors, spans_of

ALIGNMENT = 16
"""Parts of a contribution begin at multiples of so many bytes: the size of the widest data type."""
_BLOCK_BYTES = 20 << 10
_HEAD_BYTES = 1 << 10
_NOTE_BYTES = 8
_KEPT_PARTS = 256
"""How many parts of contributions are kept as arrays: to make one takes longer than to copy a small tensor."""


def memory_bytes(size: int) -> int:
    """Bytes of shared memory for the proposals of ``size`` ranks. Pages that no rank touches use no memory."""
    return in_pages(word_bytes(size)) + in_pages(2 * size * _BLOCK_BYTES)


def _block(memory: SharedMemory, slot: int, rank: int, size: int) -> Array:
    start = in_pages(word_bytes(size)) + (slot * size + rank) * _BLOCK_BYTES
    return memory.bytes[start : start + _BLOCK_BYTES]


def fits(identity: bytes, notes: Sequence[int]) -> bool:
    """Whether the head of a proposal has room for ``identity`` and ``notes``, as :meth:`Proposals.propose` takes them."""
    return len(identity) + _NOTE_BYTES * len(notes) <= _HEAD_BYTES


class Proposals:
    """One rank's view of the proposals. Only one thread at a time may use it, except :meth:`over` and :meth:`closed`.

    Args:
        memory: ``memory_bytes(size)`` bytes, mapped by every rank. This object owns the mapping from now on.
        rank, size: this rank's index in the group, and the size of the group; rank 0 is the leader.
        contributions: whether small contributions are part of a proposal; if not, the engine moves all data.

    Attributes:
        leads: whether this rank is the leader.
        data_bytes: the largest contribution in bytes; 0 without contributions.
    """

    def __init__(self, memory: SharedMemory, rank: int, size: int, contributions: bool = True) -> None:
        self.leads = rank == 0
        self.data_bytes = _BLOCK_BYTES - _HEAD_BYTES if contributions else 0
        self._memory = memory
        self._words = FutexWords(memory.words, memory.address, rank, size)
        self._size = size
        self._completed_calls: list[CompletedCalls] = []
        self._rank = rank
        self._peers = [peer for peer in range(size) if peer != rank]
        self._proposal, self._outcome, self._closed = (
            word_index(rank, PROPOSAL),
            word_index(0, OUTCOME),
            word_index(0, CLOSED),
        )
        self._blocks = [[_block(memory, slot, each, size) for each in range(size)] for slot in range(2)]
        self._heads = [[block[:_HEAD_BYTES].data for block in row] for row in self._blocks]
        self._parts: dict[tuple[int, np.dtype[Any], int, int], list[Array]] = {}  # what _contributions() has returned
        self._workspace = Workspace()
        self._given_up = word_index(rank, GIVEN_UP)
        self._proposal_of = [word_index(each, PROPOSAL) for each in range(size)]
        self._given_up_by = [(peer, word_index(peer, GIVEN_UP)) for peer in self._peers]
        self._slot = 0
        self._concluded = 0  # the outcome of the last try that this rank has concluded itself
        self._notified: dict[int, list[int]] = {peer: [] for peer in self._peers}

    # For every rank.

    def contribute(self, vectors: Vectors, start: int) -> None:
        """Write a part of this rank's contribution to the try that it proposes for next.

        Args:
            vectors: of one dtype.
            start: the byte, of ``data_bytes``, where they begin; a multiple of :data:`ALIGNMENT`.
        """
        self._slot = ~max(self._words.values[self._outcome], self._concluded) & 1
        if len(vectors) == 1:
            vector = vectors[0]
            np.copyto(self._contributions(vector.dtype, start, vector.size)[self._rank], vector)
        elif vectors:
            source = spans_of(vectors)
            source.read(0, source.length, self._contributions(source.dtype, start, source.length)[self._rank])

    def propose(self, identity: bytes, notes: Sequence[int] = ()) -> int:
        """Take part in the present try, and return its number. The leader opens the fast path by it.

        Args:
            identity: the bytes that must be the same on all ranks; no identity may be a prefix of another.
            notes: numbers that this rank passes to the others (:meth:`notes`). They and ``identity`` must fit (:func:`fits`).
        """
        outcome = max(self._words.values[self._outcome], self._concluded)
        number = (outcome >> 1) + 1
        self._slot = slot = ~outcome & 1  # the slot is free: this rank has taken part in every success so far
        head = self._heads[slot][self._rank]
        head[: len(identity)] = identity
        if notes:
            head[_HEAD_BYTES - _NOTE_BYTES * len(notes) :] = array("Q", notes).tobytes()
        if self.leads:
            self._words.values[self._closed] = 0
        self._words.publish(self._proposal, number)
        return number

    def conclude(self, number: int, identity: bytes) -> bool:
        """For a peer that has proposed for try ``number``: whether the try succeeds because all ranks have proposed the same.

        The rank that proposes last knows this without the leader, which may be asleep. The leader sees it, too, even if it is
        about to let the try fail (:meth:`withdraw`).
        """
        values, leader = self._words.values, self._proposal_of[0]
        if values[leader] != number:
            return False
        for peer in self._peers:
            if (peer and values[self._proposal_of[peer]] < number) or not self.alike(peer, identity):
                return False
        self._words.read_fence()
        if values[leader] != number:  # the last that is read: the others had proposed while the leader still took part
            return False
        self._concluded = 2 * number + self._slot
        return True

    def closed(self) -> bool:
        """Whether the leader does not use the fast path. Check it after proposing, too: the leader may have closed the fast
        path without seeing the proposal."""
        return bool(self._words.values[self._closed])

    def over(self, number: int) -> bool:
        """Whether the leader has ended try ``number``."""
        return self._words.values[self._outcome] >> 1 >= number

    def succeeded(self) -> bool:
        """Whether the try of this rank's last proposal succeeded. The try must be :meth:`over`."""
        self._words.read_fence()
        return self._words.values[self._outcome] & 1 == self._slot

    def await_outcome(self, number: int, spins: int, seconds: float) -> bool:
        """Wait for the end of try ``number``; return whether it is over. Polls ``spins`` times, then sleeps at most
        ``seconds``."""
        return self._words.await_value(self._outcome, 2 * number, spins, seconds)

    def stop_waiting(self, number: int) -> bool:
        """Have the leader send a message if try ``number`` succeeds from now on. Returns whether the try is already over."""
        self._words.publish(self._given_up, number)
        return self.over(number)

    def notes(self, count: int) -> tuple[tuple[int, ...], ...]:
        """After a success: the notes of all ranks, by rank. Each rank has passed ``count`` of them to :meth:`propose`."""
        notes = slice(_HEAD_BYTES - _NOTE_BYTES * count, _HEAD_BYTES)
        return tuple(tuple(head[notes].cast("Q")) for head in self._heads[self._slot])

    # The numbers of bytes ``start`` are those of contribute().

    def reduce(self, outputs: Vectors, op: ReduceOp, prescale: float, postscale: float, start: int = 0) -> None:
        """After a success: reduce all contributions, from byte ``start`` on, into ``outputs``, with the bits that an engine
        would give."""
        if len(outputs) == 1:
            only = outputs[0]
            contributions = self._contributions(only.dtype, start, only.size)
            reduce_into(only, contributions, op, prescale, postscale, self._workspace)
        elif outputs:
            target = spans_of(outputs)
            contributions = self._contributions(target.dtype, start, target.length)
            target.reduce(0, target.length, contributions, op, prescale, postscale, self._workspace)

    def broadcast(self, outputs: Vectors, root: int, start: int = 0) -> None:
        """After a success: copy the contribution of ``root``, from byte ``start`` on, into ``outputs``."""
        if outputs and root != self._rank:
            target = spans_of(outputs)
            target.write(0, target.length, self._contributions(target.dtype, start, target.length)[root])

    def allgather(self, output: Array, counts: Sequence[int]) -> None:
        """After a success: concatenate all contributions, ``counts[r]`` elements of rank r, into ``output``."""
        start = 0
        for contribution, count in zip(self._contributions(output.dtype, 0, max(counts)), counts, strict=True):
            output[start : start + count] = contribution[:count]
            start += count

    def alltoall(self, outputs: Vectors, received: Sequence[int], counts: Sequence[Sequence[int]]) -> None:
        """After a success: copy into ``outputs`` the parts of all contributions that go to this rank.

        Args:
            outputs: one vector, or one for each rank.
            received: by rank, the number of elements that go to this rank.
            counts: ``counts[r][s]`` consecutive elements of rank r's contribution go to rank s.
        """
        parts = parts_of(outputs, received)
        contributions = self._contributions(parts[0].dtype, 0, max(map(sum, counts)))
        for part, contribution, row in zip(parts, contributions, counts, strict=True):
            begin = sum(row[: self._rank])
            part[:] = contribution[begin : begin + part.size]

    # For the leader.

    def await_proposal(self, peer: int, number: int, spins: int, seconds: float) -> bool:
        """Wait until a peer takes part in try ``number``; return whether it does. Polls ``spins`` times, then sleeps at most
        ``seconds``."""
        return self._words.await_value(self._proposal_of[peer], number, spins, seconds)

    def alike(self, peer: int, identity: bytes) -> bool:
        """Whether a peer that takes part has proposed ``identity``, too."""
        self._words.read_fence()
        return bool(self._heads[self._slot][peer][: len(identity)] == identity)

    def withdraw(self, number: int, identity: bytes) -> bool:
        """Take part in try ``number`` no more. Returns whether it succeeds nevertheless: all ranks have proposed the same by
        now, and one of them may have concluded that (:meth:`conclude`)."""
        self._words.publish(self._proposal, 0)
        values = self._words.values
        return all(values[self._proposal_of[peer]] >= number and self.alike(peer, identity) for peer in self._peers)

    def decide(self, success: bool) -> list[int]:
        """End the present try.

        Args:
            success: whether it succeeds; only if all ranks take part and their proposals are alike.

        Returns:
            After a success, the peers that have stopped waiting, to which the leader must send a message.
        """
        outcome = self._words.values[self._outcome]
        self._words.publish(self._outcome, (outcome + 2) ^ success)
        if not success:
            return []
        number = (outcome >> 1) + 1
        values, notified = self._words.values, []
        for peer, given_up in self._given_up_by:
            if values[given_up] == number:
                self._notified[peer].append(number)
                notified.append(peer)
        return notified

    def give_up(self, peer: int, number: int) -> bool:
        """Handle the message of a peer that has stopped waiting for try ``number``: end the try if it is not over.

        Returns:
            Whether the try had succeeded after the peer stopped waiting, so that :meth:`decide` has returned that peer.

        Raises:
            ValueError: there has been no such try.
        """
        over = self._words.values[self._outcome] >> 1
        if not 0 < number <= over + 1:
            raise ValueError(f"try {number} of {over + 1}")
        if number > over:
            self.decide(False)
        succeeded = number in self._notified[peer]
        self._notified[peer] = [each for each in self._notified[peer] if each > number]
        return succeeded

    def shut(self) -> None:
        """Close the fast path, and end the present try if a peer takes part in it: so no rank waits for a leader that does not
        answer."""
        if self._words.values[self._closed]:
            return
        self._words.values[self._closed] = 1
        fence()  # a peer that does not see this word has made its proposal before, so the proposal is seen below
        number = (self._words.values[self._outcome] >> 1) + 1
        if any(self._words.values[self._proposal_of[peer]] == number for peer in self._peers):
            self.decide(False)

    def reopen(self) -> None:
        """Open the fast path again."""
        self._words.values[self._closed] = 0

    def _contributions(self, dtype: np.dtype[Any], start: int, length: int) -> list[Array]:
        """By rank, ``length`` elements of its contribution to the present try from byte ``start`` on."""
        part = self._slot, dtype, start, length
        found = self._parts.get(part)
        if found is None:
            if len(self._parts) >= _KEPT_PARTS:
                self._parts.clear()
            begin = _HEAD_BYTES + start
            end = begin + length * dtype.itemsize
            found = self._parts[part] = [block[begin:end].view(dtype) for block in self._blocks[self._slot]]
        return found

    def completed_calls(self, spins: int) -> CompletedCalls:
        """The numbers of completed calls, which are in the same memory. They are released with it.

        Args:
            spins: as of :class:`CompletedCalls`.
        """
        made = CompletedCalls(self._memory.words, self._memory.address, self._rank, self._size, spins)
        self._completed_calls.append(made)
        return made

    def descriptors(self) -> list[int]:
        """Open file descriptors, which a forked child must close."""
        return [self._memory.descriptor]

    def close(self) -> None:
        """Release the memory."""
        self._parts.clear()
        self._blocks.clear()
        self._heads.clear()
        self._words.release()
        for each in self._completed_calls:
            each.release()
        self._memory.close()
