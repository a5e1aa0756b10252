"""Measures the phases of a step on this rank: loading data, forward, backward, waiting, update.

The hooks of an optimizer and of a data loader say when one phase ends and the next begins (:meth:`StepClock.enter`). Nothing is
measured beyond that, so a phase costs one reading of the clock. Time that belongs to no other phase counts as forward. Another
thread reads the clock at intervals (:mod:`horovod.observe.progress`).
"""

from __future__ import annotations

import threading
from collections import deque
from time import monotonic

# Plain numbers, because an attribute of an enumeration takes longer to look up than all else that enter() does.
DATA, FORWARD, BACKWARD, REDUCTION, UPDATE = range(5)
STEP = 5
"""Marks the end of a step among the spans."""

_MOST_SPANS = 1 << 14
"""How many spans are kept until they are taken."""

PhaseSpan = tuple[int, float, float]
"""A phase, its begin and its end."""

_STEPS_OF_OTHERS = 100
"""The number of steps of other optimizers alone after which another optimizer counts the steps."""


class StepClock:
    """The phases of one process. :meth:`enter` is for the thread that trains, and for threads that work for it.

    Attributes:
        totals: the seconds in each phase so far.
        phase, since: the present phase, and when it began by ``time.monotonic``; 0: no hook was called yet.
        steps: the number of steps that an optimizer has made.
        samples: the number of samples that the data loader has delivered.
        spans: the phases that have ended, the oldest first, until they are taken.
    """

    __slots__ = (
        "_anchor",
        "_others",
        "_thread",
        "phase",
        "samples",
        "since",
        "spans",
        "steps",
        "totals",
    )

    def __init__(self) -> None:
        self.totals = [0.0] * 5
        self.phase = FORWARD
        self.since = 0.0
        self.steps = self.samples = 0
        self.spans: deque[PhaseSpan] = deque(maxlen=_MOST_SPANS)
        self._anchor: object = None
        self._others = 0
        self._thread = 0

    def enter(self, phase: int) -> int:
        """Begin ``phase``. Returns the previous one."""
        now = monotonic()
        before, since = self.phase, self.since
        if since:
            self.totals[before] += now - since
            self.spans.append((before, since, now))
        self.phase, self.since = phase, now
        return before

    def stepped(self, optimizer: object) -> None:
        """An optimizer has made a step.

        Args:
            optimizer: its name. With several optimizers, steps of the first one count.
        """
        self.enter(FORWARD)
        self._thread = threading.get_ident()
        if optimizer != self._anchor and self._anchor is not None and self._others < _STEPS_OF_OTHERS:
            self._others += 1
            return
        self._anchor, self._others = optimizer, 0
        self.steps += 1
        self.spans.append((STEP, self.since, self.since))

    def taken(self) -> list[PhaseSpan]:
        """Take the spans. For one thread."""
        found = []
        while self.spans:
            found.append(self.spans.popleft())
        return found

    def trains(self) -> bool:
        """Whether the calling thread makes the steps, so that what it waits for delays them."""
        return self._thread in (0, threading.get_ident())


clock = StepClock()
"""The clock of this process."""
