"""Collectives between ``init()`` and ``hvd.elastic.run``, in an elastic job.

A process that joins a running job meets the other ranks in ``hvd.elastic.run`` and nowhere else: there they synchronise the
state before any other collective. So until it gets there, broadcasts of parameters and of optimizer state, and the
synchronisation of a state, leave its own values, which ``hvd.elastic.run`` overwrites, and every other collective raises. In
the first round no rank has reached ``hvd.elastic.run``, so these collectives work; one warning on rank 0 says what they do in
a process that joins later.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from horovod.core.negotiation.messages import Operation
from horovod.observe.call_site import caller

_log = logging.getLogger("horovod.elastic")


class BeforeRun:
    """The guard of a generation whose process has not entered ``hvd.elastic.run``: it is asked about each collective.

    Args:
        alone: whether the other ranks are in ``hvd.elastic.run``, so that none takes part.
        rank: this rank.
    """

    def __init__(self, alone: bool, rank: int) -> None:
        self.alone = alone
        self._warned = rank != 0

    def __call__(self, operation: int) -> None:
        """A collective is about to be submitted. Raises RuntimeError if no other rank takes part."""
        self.meet(Operation(operation).name.lower())

    def meet(self, what: str) -> None:
        """``what``, for which ranks wait for each other, is about to begin. Raises RuntimeError if no other takes part."""
        if self.alone:
            raise RuntimeError(
                f"{what} at {caller()}: no other rank takes part. This process has joined a running job, whose ranks are in "
                "hvd.elastic.run, and has not reached it yet. Call collectives in the training function; what all ranks need "
                "at the start belongs in the state, which hvd.elastic.run gives to new processes"
            )
        self.tell(what)

    def tell(self, what: str) -> None:
        """Warn, once, that ``what`` is called in front of ``hvd.elastic.run``."""
        if self._warned:
            return
        self._warned = True
        _log.warning(
            "%s at %s is called before hvd.elastic.run. In a process that joins this job later, no other rank takes part in a "
            "collective there: broadcasts of parameters and of optimizer state do nothing, since hvd.elastic.run gives the "
            "process the state of the others, and every other collective raises an error. Remove the line, or move it into "
            "the training function.",
            what,
            caller(),
        )

    @contextmanager
    def unwarned(self) -> Iterator[None]:
        """A block whose collectives the script does not call by itself: they are no reason to warn."""
        warned, self._warned = self._warned, True
        try:
            yield
        finally:
            self._warned = warned
