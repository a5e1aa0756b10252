"""How many calls each rank of one host has completed, as words of shared memory that all of these ranks read.

A rank that finds a number in the words of all ranks knows, without a message, that all of them have completed so many calls.
The words stay when a rank has ended.
"""

from __future__ import annotations

from horovod.comm.shm.futex_words import ASLEEP_FOR_CALLS, COMPLETED, FutexWords, word_index


class CompletedCalls:
    """One rank's view of the numbers.

    One thread at a time may call :meth:`publish`, and one may wait.

    Args:
        words: the shared memory, at ``address``, as 64-bit words.
        rank, size: this rank's index in the group, and the size of the group.
        spins: how often a wait polls each word before it sleeps.
    """

    def __init__(self, words: memoryview, address: int, rank: int, size: int, spins: int) -> None:
        self._spins = spins
        self._words = FutexWords(words, address, rank, size, ASLEEP_FOR_CALLS)
        self._own = word_index(rank, COMPLETED)
        self._all = [word_index(each, COMPLETED) for each in range(size)]

    def publish(self, number: int) -> None:
        """This rank has completed ``number`` calls; the number never decreases. Their results are complete in its memory."""
        if self.is_open():
            self._words.publish(self._own, number)

    def lowest(self) -> int:
        """How many calls all ranks have completed. 0 once the memory was released."""
        values = self._words.values
        return min([values[each] for each in self._all]) if values else 0

    def await_all(self, number: int, seconds: float) -> bool:
        """Wait until all ranks have completed ``number`` calls; return whether they have. For each rank it polls, then sleeps
        at most ``seconds``. Returns False at once if the memory was released."""
        words = self._words
        return self.is_open() and all(words.await_value(each, number, self._spins, seconds) for each in self._all)

    def is_open(self) -> bool:
        """Whether the memory was not released yet."""
        return bool(self._words.values)

    def release(self) -> None:
        """Drop the reference to the memory."""
        self._words.release()
