"""The name of an optimizer in requests: the same on all ranks, and no other optimizer of the job has it.

Ranks that use the same optimizers for the first time in the same order give them the same names. Names of variables are not
part of it: Keras numbers layers per process, so they differ on a rank that has built another model before.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import Counter
from collections.abc import Hashable

from horovod.core.lifecycle.context import running

OPTIMIZER_NAME = re.compile(r"DistributedOptimizer\.[0-9a-f]{8}\.\d+")
"""What the names look like."""

_counting = threading.Lock()
_counts: Counter[tuple[int, str]] = Counter()
"""How many optimizers with each digest each generation has."""


class OptimizerName:
    """The name of one optimizer."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, Hashable], str] = {}

    def of(self, signature: Hashable) -> str:
        """The name in the running generation. Optimizers of one signature are counted.

        Args:
            signature: distinguishes the optimizer from most others; the same on all ranks.
        """
        generation = running().generation
        with _counting:
            name = self._names.get((generation, signature))
            if name is None:
                digest = hashlib.sha256(repr(signature).encode()).hexdigest()[:8]
                _counts[generation, digest] += 1
                name = f"DistributedOptimizer.{digest}.{_counts[generation, digest]}"
                self._names[generation, signature] = name
            return name
