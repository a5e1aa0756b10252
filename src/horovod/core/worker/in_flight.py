"""This rank's requests in flight in one process set, and the rule for which submission wakes the worker thread. For any thread.

A request is in flight from its submission until it is done, failed or withdrawn. It is announced once, by the thread that
drives the worker next. The worker thread says in which state it waits (:mod:`horovod.core.worker.waiting`). One lock guards
the requests and the state, so a thread that is about to sleep misses no submission.

The n-th calls without a name on all members belong together. A call gets its number at the moment of its submission: a call
that a signal handler interrupts earlier does not count.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Sequence

from horovod.core.errors import HorovodInternalError
from horovod.core.negotiation.messages import UNNAMED, Decision, Request, numbered, numbered_name
from horovod.core.requests.batch import Batch, Entry
from horovod.core.requests.handle import Driver, Handle
from horovod.core.worker.driving_threads import QUICK_BYTES, SLOW
from horovod.core.worker.waiting import COALESCE_MILLISECONDS, COALESCE_SECONDS, WorkerState
from horovod.observe.flight_recorder import FlightRecorder

DUPLICATE_NAME = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is currently "
    "being processed. If you want to request another tensor, use a different tensor name."
)

_WITHDRAWN = HorovodInternalError("its inputs did not arrive on this rank")

# An attribute of an enumeration takes longer to look up than everything else _wakes() does.
_AWAKE, _ASLEEP, _STANDBY = WorkerState.AWAKE, WorkerState.ASLEEP, WorkerState.STANDBY


class InFlight:
    """The requests in flight.

    Args:
        driver: the worker that threads which wait for a quick request may drive; None if they must not.
        recorder: records every submission; None for no recording.

    Attributes:
        closed: no request is accepted any more, and none in flight may be started; set once.
        error: the error of every request that was in flight; set once, after ``closed``.
        failed: set together with ``error``.
        latest: the handle of the last submission.
    """

    def __init__(self, driver: Driver | None, recorder: FlightRecorder | None = None) -> None:
        self.closed = False
        self.error: BaseException | None = None
        self.failed = threading.Event()
        self.latest = Handle()
        self._driver = driver
        self._recorder = recorder
        self._lock = threading.Lock()
        self._known: dict[str, Entry] = {}
        self._counts: dict[str, int] = {}  # of calls without a name
        self._unannounced: list[Entry] = []
        self._left_to_worker: Handle | None = None
        self._state = WorkerState.AWAKE
        self._coalesce_next = False
        self._announced_at = 0.0

    # The next three methods return whether the worker thread must be woken.

    def add(self, entry: Entry, held: bool, awaited: bool) -> bool:
        """Take a submission.

        Args:
            held: whether the request is not announced before :meth:`release`.
            awaited: the calling thread waits for it next, and carries it out if it is quick.

        Raises:
            ValueError: a request of that name is in flight.
            the error that all requests have failed with. It is raised only after all threads have left their tensors.
        """
        request, handle = entry.request, entry.handle
        unnumbered, number = "", 0
        # A thread that waits for a quick request may carry it out itself.
        quick = entry.ready is None and request.nbytes <= QUICK_BYTES and request.operation not in SLOW
        driver = self._driver if quick and not held else None
        with self._lock:
            if not self.closed:
                if request.unnamed:
                    unnumbered, number = request.name, self._counts.get(request.name, 0) + 1
                    request = numbered(request, number)
                name = request.name
                if name in self._known:
                    raise ValueError(f"{DUPLICATE_NAME} The name is {name!r}.")
                self.latest = handle
                queue = self._unannounced.append
                # All or nothing: Python runs a signal handler, which may raise, after a call, and there is none in between.
                if number:
                    entry.request = request
                    self._counts[unnumbered] = number
                self._known[name] = entry
                if held:
                    entry.held = True
                else:
                    handle.driver = driver
                    queue(entry)
                if self._recorder is not None:
                    handle.record = self._recorder.submitted(request, entry.since)
                return not held and self._state is not _AWAKE and self._wakes(entry, awaited)
        self.failed.wait()
        assert self.error is not None
        raise copy.copy(self.error)

    def release(self, entry: Entry) -> bool:
        """Let a held request be announced, if it is still in flight."""
        with self._lock:
            if self.closed or self._known.get(entry.request.name) is not entry:
                return False
            queue = self._unannounced.append
            entry.held = False  # both or neither, as in add()
            queue(entry)
            return self._state is not _AWAKE and self._wakes(entry, awaited=False)

    def leave_to_worker(self, handle: Handle) -> bool:
        """Keep the worker thread out of STANDBY until ``handle`` is done: no waiting thread will carry it out."""
        with self._lock:
            self._left_to_worker = handle
            state = self._state
            return state is WorkerState.STANDBY or (state is WorkerState.ASLEEP and bool(self._unannounced))

    def _wakes(self, entry: Entry, awaited: bool) -> bool:
        """Whether a submission wakes the worker thread, which is not awake. A thread that waits for a request with a driver may
        drive it."""
        state, driven = self._state, entry.handle.driver is not None
        if state is _STANDBY:
            return not driven
        after = entry.since - self._announced_at
        wakes = not (driven and awaited) if state is _ASLEEP else after > COALESCE_SECONDS
        if wakes:
            self._state = _AWAKE
        return wakes

    def withdraw(self, entry: Entry) -> bool:
        """Forget a held request, and do not count it; False if it has failed or was released already."""
        with self._lock:
            known = entry.held and self._known.get(entry.request.name) is entry
            if known:
                name = entry.request.name
                last = [each for each, count in self._counts.items() if numbered_name(each, count) == name]
                del self._known[name]
                for unnumbered in last:
                    self._counts[unnumbered] -= 1
        if known and entry.handle.record is not None:
            entry.handle.record.ended = time.monotonic()
            entry.handle.record.fail(_WITHDRAWN)
        return known

    def number(self, request: Request) -> Request:
        """Count the call of a request that is submitted later; the request as it is to be submitted."""
        if not request.unnamed:
            return request
        with self._lock:
            counted = self._counts.get(request.name, 0) + 1
            result = numbered(request, counted)
            self._counts[request.name] = counted
        return result

    def count_from(self, request: Request, made: int) -> None:
        """Count calls of the name of ``request``, if it is without one, from ``made`` on."""
        with self._lock:
            self._counts[request.name] = made

    def count_anew(self) -> None:
        """Reset the counts of calls without a name of all members; counts of some members stay."""
        with self._lock:
            self._counts = {name: count for name, count in self._counts.items() if not name.endswith(UNNAMED)}

    def take_out(self, members: Sequence[int]) -> list[Entry]:
        """Remove and return requests of some of the ranks, which will not take part in them any more."""
        with self._lock:
            found = [entry for entry in self._known.values() if entry.request.members == tuple(members)]
            for entry in found:
                del self._known[entry.request.name]
            self._unannounced = [entry for entry in self._unannounced if entry not in found]
        return found

    def close(self) -> None:
        """Take and announce nothing from now on. :meth:`fail` follows when no thread uses the tensors any more."""
        with self._lock:
            self.closed = True
            self._unannounced.clear()

    def fail(self, error: BaseException) -> list[Entry]:
        """Fail everything that is in flight, and all later submissions, with ``error``. Returns the requests that were in
        flight."""
        self.close()
        with self._lock:
            if self.error is None:
                self.error = error
            entries = list(self._known.values())
            self._known.clear()
        self.failed.set()
        return entries

    def oldest(self) -> Entry | None:
        """The oldest entry in flight; None if there is none."""
        with self._lock:
            return next(iter(self._known.values()), None)

    def pending(self) -> int:
        """The number of requests in flight."""
        return len(self._known)

    def awaited(self) -> list[str]:
        """The names of the requests that a thread of the script waits for."""
        with self._lock:
            return [name for name, entry in self._known.items() if entry.handle.awaited()]

    def entries(self) -> list[Entry]:
        """All requests in flight."""
        with self._lock:
            return list(self._known.values())

    # For the thread that drives the worker.

    def waiting(self) -> bool:
        """Whether there is anything to announce."""
        return bool(self._unannounced)

    def take(self) -> list[Entry]:
        """All requests to announce, in the order of submission."""
        with self._lock:
            taken, self._unannounced = self._unannounced, []
        return taken

    def take_quick(self, handle: Handle, most: int) -> list[Entry]:
        """All requests in flight, in the order of submission, if none was announced and a waiting thread may carry out all of
        them. Otherwise, or if they are more than ``most``, none.

        Args:
            handle: of one of them, unless it is done.
        """
        with self._lock:
            taken = self._unannounced
            if handle.driver is None or len(taken) > most or len(self._known) != len(taken):
                return []
            for entry in taken:
                if entry.handle.driver is None:
                    return []
            self._unannounced = []
            return taken

    def put_back(self, entries: list[Entry]) -> None:
        """Undo :meth:`take_quick`: the requests are announced before all others."""
        with self._lock:
            if not self.closed:
                self._unannounced[:0] = entries

    def batch(self, decisions: Sequence[Decision]) -> Batch:
        """Decisions with the requests that they are on; None for a name that is not in flight."""
        with self._lock:
            return [(decision, self._known.get(decision.name)) for decision in decisions]

    def finish(self, batch: Batch) -> list[Entry | None]:
        """Remove and return the requests of a batch; None for those that were not in flight."""
        with self._lock:
            return [self._known.pop(decision.name, None) for decision, _ in batch]

    def finish_one(self, name: str) -> Entry | None:
        """Like :meth:`finish`, for one name."""
        with self._lock:
            return self._known.pop(name, None)

    def none(self) -> bool:
        """Whether nothing is in flight."""
        return not self._known

    def announced(self, coalesce: bool) -> None:
        """Note that all requests that were taken have been announced.

        Args:
            coalesce: the worker thread waits a moment for more submissions before it sleeps, if an answer is due.
        """
        self._coalesce_next, self._announced_at = coalesce, time.monotonic()

    # For the worker thread.

    def begin_standby(self) -> bool:
        """Enter STANDBY; False, and it does not, if something is in flight that no waiting thread carries out."""
        with self._lock:
            if self._left_to_worker is not None and not self._left_to_worker.done():
                return False
            if any(entry.handle.driver is None and not entry.held for entry in self._known.values()):
                return False
            self._state = WorkerState.STANDBY
        return True

    def begin_wait(self, busy: bool) -> int:
        """Enter the state to wait in. Returns the milliseconds to wait; -1: until it is woken.

        Args:
            busy: the thread has something to do and does not wait.
        """
        with self._lock:
            coalesce, self._coalesce_next = self._coalesce_next, False
            if busy or self._unannounced:
                return 0
            if coalesce and self._known:
                self._state = WorkerState.COALESCING
                return COALESCE_MILLISECONDS
            self._state = WorkerState.ASLEEP
            return -1

    def end_wait(self) -> None:
        """Enter AWAKE."""
        with self._lock:
            self._state = WorkerState.AWAKE
