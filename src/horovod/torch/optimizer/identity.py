"""What the ranks call an optimizer: the same name on every rank, without a word between them.

Optimizers are told apart by their parameters, and among like ones by a number: the first, the second, ... that this
process set makes in a generation. An optimizer that lives on in a later generation keeps its number. So it finds its like
on a process for which this generation is the first. Where an optimizer made in that generation has taken the number, it
gets the smallest free one.
"""

from __future__ import annotations

import hashlib
from itertools import count

from horovod.core.lifecycle.context import running
from horovod.core.process_set import ProcessSet

_numbers: dict[tuple[str, int | None], set[int]] = {}
"""The numbers that optimizers have in the generation ``_counted``, by signature and process set."""
_counted = -1


class Identity:
    """One optimizer's name.

    Args:
        signature: the names, shapes and types of its parameters.
        process_set: whose optimizers are counted.
        original: made by a call that every rank of the set makes, so it takes its number at once. A copy, which one rank
            may make for itself, is counted apart, when it is first used.
    """

    def __init__(self, signature: object, process_set: ProcessSet, original: bool = True) -> None:
        self._digest = hashlib.sha256(repr(signature).encode()).hexdigest()[:8]
        self._process_set = process_set
        self._generation = -1
        self._number = 0
        if original:
            self.name()

    def name(self) -> str:
        """In the running generation.

        Raises:
            HorovodInternalError: there is none.
        """
        generation = running().generation
        if generation != self._generation:
            key = self._digest, self._process_set.process_set_id
            self._generation, self._number = generation, _take(generation, key, self._number)
        return f"DistributedOptimizer.{self._digest}.{self._number}"

    def copied(self) -> Identity:
        """For a copy of the optimizer."""
        return Identity(("copy", self._digest), self._process_set, original=False)


def _take(generation: int, key: tuple[str, int | None], kept: int) -> int:
    """The number ``kept`` if it is one and free, else the smallest that is."""
    global _counted
    if generation != _counted:
        _numbers.clear()
        _counted = generation
    taken = _numbers.setdefault(key, set())
    number = kept if kept and kept not in taken else next(free for free in count(1) if free not in taken)
    taken.add(number)
    return number
