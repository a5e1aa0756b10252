"""The states and constants of the waits of a rank's threads.

A sleeping thread costs nothing, but waking it takes 40 to 100 microseconds, as long as a small collective takes. So a thread
that expects an answer soon polls for a while before it sleeps. If ranks share a core, it sleeps at once: a peer needs the core.

The worker thread is in one of four states::

    state       what it waits for              for how long                        which submission wakes it
    AWAKE       nothing; or it polls for       WORKER_POLLS polls, about 100 us    none: it looks at the queue anyway
                messages while another
                thread waits for a handle
    COALESCING  messages and wake-ups, after   COALESCE_MILLISECONDS               one that comes COALESCE_SECONDS or more
                an announcement                                                    after the announcement
    ASLEEP      messages and wake-ups          until a probe or a report is due    any, unless the calling thread waits for
                                                                                   the handle and drives the worker
    STANDBY     wake-ups; other threads        STANDBY_ROUNDS times                one that no waiting thread may carry out
                drive the worker               STANDBY_MILLISECONDS

A thread of the script that waits for a handle goes through up to three phases::

    phase       what it waits for              for how long
    fast path   futex words                    WORD_ROUNDS times WORD_POLLS polls, then SLEEPS sleeps of SLEEP_SECONDS
    driving     messages                       DRIVER_POLLS polls, then SLEEPS sleeps of SLEEP_SECONDS
    blocked     its handle                     until the worker thread has completed it

These are the longest phases of polling. How long a thread polls follows from its last waits (:class:`Patience`): on a machine
with other work, whose peers are not on a core when they are waited for, it sleeps almost at once.

While a thread drives the worker, signal handlers are deferred; so driving ends after some ten milliseconds without an answer.
A thread that waits inside a collective waits as the engine does (:mod:`horovod.comm.shm.counters`).
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class WorkerState(Enum):
    """The states of the worker thread; see the table above."""

    AWAKE = 0
    COALESCING = 1
    ASLEEP = 2
    STANDBY = 3


COALESCE_SECONDS = 200e-6
"""Submissions within this time after an announcement wake no thread: a burst of small tensors costs only a few wake-ups."""

COALESCE_MILLISECONDS = 1

STANDBY_MILLISECONDS = 5
STANDBY_ROUNDS = 20

SLEEP_SECONDS = 1e-3
SLEEPS = 10


QUICK_SECONDS = 200e-6
"""A sleep that ended sooner would have been spared by polling on."""


class Patience:
    """How often a thread polls before it sleeps, learned from how its last waits ended.

    Args:
        most: the most polls, with which it begins.
    """

    __slots__ = ("_most", "polls")

    def __init__(self, most: int) -> None:
        self._most = self.polls = most

    def answered(self) -> None:
        """A wait has ended while the thread polled. Not to be called for an answer that was there at the first poll: it says
        nothing about how long the next will take, and on a machine with other work every other one is."""
        if self.polls < self._most:
            self.polls = min(self._most, 2 * self.polls)

    def slept(self, seconds: float) -> None:
        """The thread polled in vain, and slept for ``seconds`` afterwards."""
        if seconds < QUICK_SECONDS:
            self.answered()
        else:
            self.polls = max(1, self.polls // 2)


class Polls(NamedTuple):
    """How often each thread polls before it sleeps."""

    worker: int
    driver: int
    word: int
    word_rounds: int


WITH_OWN_CORE = Polls(worker=50, driver=100, word=40, word_rounds=50)
"""About a hundred microseconds each. The answer to a small collective takes less."""

WITH_SHARED_CORE = Polls(worker=0, driver=1, word=1, word_rounds=1)


def polls(spins: bool) -> Polls:
    """How often to poll.

    Args:
        spins: whether this rank, and every rank that may use its cores, can have a core to itself.
    """
    return WITH_OWN_CORE if spins else WITH_SHARED_CORE
