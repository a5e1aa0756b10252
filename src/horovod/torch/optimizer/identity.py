"""The name of an optimizer in requests. It is the same on every rank, and the ranks do not communicate to agree on it.

The name contains a digest of the parameters, and a number that counts the optimizers with this digest and process set in a
generation. An optimizer that is used again in a later generation keeps its number if the number is free. So its name is that of
the corresponding optimizer in a new process. Otherwise it gets the smallest free number.
"""

from __future__ import annotations

import hashlib
from itertools import count

from horovod.core.lifecycle.context import running
from horovod.core.lifecycle.process_set import ProcessSet

_numbers: dict[tuple[str, int | None], set[int]] = {}
"""The numbers in use in the generation ``_counted``, by digest and process set."""
_counted = -1


class OptimizerIdentity:
    """One optimizer's name.

    Args:
        signature: the names, shapes and types of the optimizer's parameters.
        process_set: the process set whose optimizers are counted.
        original: True if every rank of the set makes this optimizer: then it gets its number immediately. A copy may exist on
            only one rank, so it gets a number, from a separate count, when it is first used.
    """

    def __init__(self, signature: object, process_set: ProcessSet, original: bool = True) -> None:
        self._digest = hashlib.sha256(repr(signature).encode()).hexdigest()[:8]
        self._process_set = process_set
        self._generation = -1
        self._number = 0
        if original:
            self.name()

    @property
    def is_named(self) -> bool:
        """Whether the optimizer has its name in the running generation."""
        return self._generation == running().generation

    def name(self) -> str:
        """The name in the running generation.

        Raises:
            HorovodInternalError: not initialised.
        """
        generation = running().generation
        if generation != self._generation:
            key = self._digest, self._process_set.process_set_id
            self._generation, self._number = generation, _take(generation, key, self._number)
        return f"DistributedOptimizer.{self._digest}.{self._number}"

    def copied(self) -> OptimizerIdentity:
        """The identity of a copy of the optimizer."""
        return OptimizerIdentity(("copy", self._digest), self._process_set, original=False)


def _take(generation: int, key: tuple[str, int | None], kept: int) -> int:
    """Take the number ``kept`` if it is not 0 and free, otherwise the smallest free number."""
    global _counted
    if generation != _counted:
        _numbers.clear()
        _counted = generation
    taken = _numbers.setdefault(key, set())
    number = kept if kept and kept not in taken else next(free for free in count(1) if free not in taken)
    taken.add(number)
    return number
