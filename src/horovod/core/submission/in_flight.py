"""This rank's requests in flight in one process set, and when one of them must wake the worker thread. For any thread.

A request is in flight from its submission until it is done, failed or withdrawn. It is announced once, by whoever takes the
worker thread's turn next. The worker thread says how it rests, and here is decided, under one lock, who has to disturb it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

from horovod.core.execution.batch import Entry
from horovod.core.execution.progress import is_quick
from horovod.core.submission.handle import Driver, Handle

DUPLICATE_NAME = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is currently "
    "being processed. If you want to request another tensor, use a different tensor name."
)

NAP_SECONDS = 200e-6
"""After an announcement, how long submissions gather before one of them wakes the worker thread again: a burst of small tensors
costs a few wake-ups instead of one each. The worker thread rests so for at most a millisecond, and only while an answer is
due."""

GATHER_MILLISECONDS = 1


class InFlight:
    """What is in flight.

    Args:
        driver: what a thread that waits for a quick request takes turns of; None if it is not to.

    Attributes:
        closed: nothing is taken any more, and nothing that is in flight may be begun; set once.
        error: with what everything that was in flight has failed; set once, after ``closed``.
        failed: set with ``error``.
        latest: the handle of what was submitted last.
    """

    def __init__(self, driver: Driver | None) -> None:
        self.closed = False
        self.error: BaseException | None = None
        self.failed = threading.Event()
        self.latest = Handle()
        self._driver = driver
        self._lock = threading.Lock()
        self._known: dict[str, Entry] = {}
        self._unannounced: list[Entry] = []
        self._expedited: Handle | None = None
        self._asleep = self._napping = self._parked = False
        self._nap_next = False
        self._announced_at = 0.0

    # The next three return whether the worker thread must be woken.

    def add(self, entry: Entry, held: bool, awaited: bool) -> bool:
        """A request is submitted.

        Args:
            held: it is not announced before :meth:`release`.
            awaited: the calling thread waits for it next, and carries it out where it is quick.

        Raises:
            ValueError: a request of that name is in flight.
            the error with which the worker thread has failed; not before the tensors of all requests are left alone.
        """
        name, handle = entry.request.name, entry.handle
        driver = self._driver if not held and is_quick(entry) else None
        with self._lock:
            if not self.closed:
                if self._known.setdefault(name, entry) is not entry:
                    raise ValueError(f"{DUPLICATE_NAME} The name is {name!r}.")
                self.latest = handle
                if held:
                    entry.held = True
                    return False
                handle.driver = driver
                return self._queue(entry, awaited)
        self.failed.wait()
        assert self.error is not None
        raise type(self.error)(*self.error.args)

    def release(self, entry: Entry) -> bool:
        """A held request may be announced, unless it is no longer in flight."""
        with self._lock:
            entry.held = False
            known = not self.closed and self._known.get(entry.request.name) is entry
            return known and self._queue(entry, awaited=False)

    def expedite(self, handle: Handle) -> bool:
        """The worker thread is to take turns until this is done, and not to leave them to threads that wait."""
        with self._lock:
            self._expedited = handle
            return self._parked or (self._asleep and bool(self._unannounced))

    def _queue(self, entry: Entry, awaited: bool) -> bool:
        self._unannounced.append(entry)
        if not (self._asleep or self._napping or self._parked):
            return False
        driven = entry.handle.driver is not None  # whoever waits for it takes the turn
        wake = (
            (self._asleep and not (driven and awaited))
            or (self._napping and entry.since - self._announced_at > NAP_SECONDS)
            or (self._parked and not driven)
        )
        if wake:
            self._asleep = self._napping = False
        return wake

    def withdraw(self, entry: Entry) -> bool:
        """Forget a held request; False if it has failed already."""
        with self._lock:
            known = self._known.get(entry.request.name) is entry
            if known:
                del self._known[entry.request.name]
        return known

    def take_out(self, members: Sequence[int]) -> list[Entry]:
        """Forget, and return, requests of some of the ranks, who will not take part in them any more."""
        with self._lock:
            found = [entry for entry in self._known.values() if entry.request.members == tuple(members)]
            for entry in found:
                del self._known[entry.request.name]
            self._unannounced = [entry for entry in self._unannounced if entry not in found]
        return found

    def close(self) -> None:
        """Nothing is taken or announced from now on; :meth:`fail` follows when no thread uses the tensors any more."""
        with self._lock:
            self.closed = True
            self._unannounced.clear()

    def fail(self, error: BaseException) -> list[Entry]:
        """Everything fails with ``error``, and so does whatever is submitted from now on. Returns what was in flight."""
        self.close()
        with self._lock:
            if self.error is None:
                self.error = error
            entries = list(self._known.values())
            self._known.clear()
        self.failed.set()
        return entries

    def oldest(self) -> Entry | None:
        """What was submitted first of all that is in flight."""
        with self._lock:
            return next(iter(self._known.values()), None)

    # For whoever takes the worker thread's role.

    def waiting(self) -> bool:
        """Whether there is anything to announce."""
        return bool(self._unannounced)

    def take(self) -> list[Entry]:
        """All that is to be announced, in the order of submission."""
        with self._lock:
            taken, self._unannounced = self._unannounced, []
        return taken

    def take_alone(self, handle: Handle) -> Entry | None:
        """The request of ``handle``, if it has not been announced, and nothing else is in flight."""
        with self._lock:
            if len(self._known) != 1 or len(self._unannounced) != 1 or self._unannounced[0].handle is not handle:
                return None
            return self._unannounced.pop()

    def put_back(self, entry: Entry) -> None:
        """Of :meth:`take_alone`: it is to be announced after all, before anything else."""
        with self._lock:
            if not self.closed:
                self._unannounced.insert(0, entry)

    def find(self, names: Iterable[str]) -> list[Entry | None]:
        """The requests of these names; None for what is not in flight."""
        with self._lock:
            return [self._known.get(name) for name in names]

    def finish(self, names: Iterable[str]) -> list[Entry | None]:
        """The same, and they are not in flight any more."""
        with self._lock:
            return [self._known.pop(name, None) for name in names]

    def none(self) -> bool:
        """Whether nothing is in flight."""
        return not self._known

    def announced(self, nap: bool) -> None:
        """What was taken has been announced.

        Args:
            nap: the worker thread naps before it sleeps, if an answer is due.
        """
        self._nap_next, self._announced_at = nap, time.monotonic()

    # For the worker thread.

    def stand_by(self) -> bool:
        """Leave turns to threads that wait; False if there is something that those do not do."""
        with self._lock:
            if self._expedited is not None and not self._expedited.done():
                return False
            if any(entry.handle.driver is None and not entry.held for entry in self._known.values()):
                return False
            self._parked = True
        return True

    def rest(self, busy: bool) -> int:
        """How many milliseconds to wait for something to do, until which the thread is to be woken; -1: without end.

        Args:
            busy: not at all.
        """
        with self._lock:
            nap, self._nap_next = self._nap_next, False
            if busy or self._unannounced:
                return 0
            if nap and self._known:
                self._napping = True
                return GATHER_MILLISECONDS
            self._asleep = True
            return -1

    def rise(self) -> None:
        """The thread does not rest any more."""
        with self._lock:
            self._asleep = self._napping = self._parked = False
