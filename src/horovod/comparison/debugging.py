"""Looks for mistakes in the steps of an optimizer of TensorFlow, Keras or MXNet on this rank, for ``HOROVOD_DEBUG``.

:mod:`horovod.comparison.guard` calls it in each step, and lets the ranks compare what it found. PyTorch's binding, whose ranks
may wait for each other between two steps, has :mod:`horovod.torch.optimizer.debugging`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from horovod.comm.datatypes import Array
from horovod.comparison.training_mistakes import (
    FIRST_STEPS,
    GradientWatch,
    account_of_batches,
    account_of_gradient,
    same_in_all,
)
from horovod.core.lifecycle.context import running
from horovod.core.lifecycle.process_set import ProcessSet
from horovod.observe.threads import main_thread

_log = logging.getLogger("horovod")

_ADVICE = "dataset.shard(hvd.size(), hvd.rank()) of tf.data, or every hvd.size()-th sample from the hvd.rank()-th on"


class DataOrder:
    """How the datasets of this process are shuffled before they are divided among the ranks.

    Attributes:
        wanted: whether shuffles are noted.
        held: the descriptions of the shuffles, by their names.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.held: dict[str, str] = {}


order = DataOrder()
"""The order of the datasets of this process."""


class ModelDebugger:
    """The checks of one optimizer.

    Args:
        process_set: the ranks that train together.
        owner: the optimizer and the line of the script that made it, as text.
    """

    def __init__(self, process_set: ProcessSet, owner: str) -> None:
        self._set, self._owner = process_set, owner
        self._watch = GradientWatch()
        self._rows: list[Mapping[int, bytes]] = []
        self._place = ""

    def see(self, name: str, values: Array) -> None:
        """Look at a gradient of this rank, before it is reduced. Reports the first gradient that is not finite."""
        found = self._watch.see(name, values)
        if found is not None:
            step, bad = found
            _log.warning(account_of_gradient(running().identity.rank, name, step, self._owner, bad))

    def gradients(self, step: int) -> bytes:
        """A digest of this rank's gradients in a step that is over."""
        self._place = self._place or main_thread()
        return self._watch.taken(step)

    def take_gradients(self, own: bytes, rows: Mapping[int, bytes] | None) -> None:
        """Take the result when the ranks have compared the gradients of one of the first steps.

        Args:
            own: this rank's digest.
            rows: the digests of all ranks. None: all are equal.
        """
        self._rows.append(dict.fromkeys(self._set.ranks or (), own) if rows is None else rows)
        if len(self._rows) != FIRST_STEPS:
            return
        for group in same_in_all(self._rows):
            if group[0] == running().identity.rank:
                _log.warning(
                    account_of_batches(
                        group,
                        f"have computed the same gradients, bit for bit, in the first {FIRST_STEPS} steps of "
                        f"{self._owner}, when rank {group[0]} was at {self._place}: they train on the same batches",
                        _ADVICE,
                    )
                )


def debugger(process_set: ProcessSet, owner: str) -> ModelDebugger | None:
    """The checks for an optimizer of the running generation; None without ``HOROVOD_DEBUG``."""
    if not running().config.debug or len(process_set.ranks or ()) < 2:
        return None
    return ModelDebugger(process_set, owner)
