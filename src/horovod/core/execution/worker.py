"""The thread that serves one process set: announces what was submitted, receives orders, executes them one by one.

One thread does both because it can do nothing better while a collective runs: what becomes ready meanwhile gathers in the
sockets and travels together as the next batch. Other threads append to a queue. The worker thread sleeps in one
``poll`` over its connections and a bell, without a timeout while nothing is pending.

What the worker thread does, it does in turns, which a thread that waits for a quick collective may take as well
(:mod:`horovod.core.execution.progress`). Whatever is large, or ends the worker thread, is left to the worker thread.

A member's worker thread (:mod:`horovod.core.coordination.member`) announces to the coordinator and follows its orders;
the coordinator's own worker thread, on the set's first rank, is :class:`horovod.core.coordination.coordinator.CoordinatorLane`.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from horovod.comm.base import Aborted, Communicator, PeerFailure
from horovod.comm.shm.proposals import Proposals
from horovod.control.channel import Channel, ChannelClosed
from horovod.core.config import Config
from horovod.core.coordination.messages import Decision, MessageError, Request
from horovod.core.coordination.negotiator import NegotiationError
from horovod.core.errors import SHUT_DOWN, HorovodInternalError
from horovod.core.execution.batch import Batch, Entry, execute, size_of
from horovod.core.execution.connections import Connections, ReadyConnections
from horovod.core.execution.cpu_affinity import ANYWHERE, Placement
from horovod.core.execution.fast_path import FastPath
from horovod.core.execution.progress import QUICK_BYTES, STANDBY_MILLISECONDS, STANDBYS, Progress, may_drive
from horovod.core.submission.handle import Handle
from horovod.core.submission.in_flight import InFlight

_log = logging.getLogger("horovod.core")

POLLS_BEFORE_SLEEP = 50
"""Looks at the connections before sleeping while somebody waits for this lane: about a hundred microseconds, of a process
that has nothing else to do. The answer to a small collective takes less, and a sleep and a wake-up cost as much as it does."""


def still_in_use(error: HorovodInternalError) -> HorovodInternalError:
    """The same error for who must not use the tensors' memory again, because a thread could not be got out of a collective."""
    return HorovodInternalError(
        f"{error} A thread of this rank (horovod-worker) did not leave a collective in time, so the tensors of collectives "
        "that were in flight may still be read and written: end this process instead of using them again."
    )


class Watch(Protocol):
    """What a worker thread needs of the liveness monitor."""

    call_sites: dict[int, str]

    def report(self, rank: int, reason: str, suspected: bool = False) -> None: ...

    def report_no_progress(self, rank: int, reason: str, times: int) -> None: ...

    def probe(self) -> None: ...


class WorkerThread(ABC):
    """One process set's queue and thread on this rank.

    Args:
        ranks: the members' global ranks, in set order.
        index: this rank's place in ``ranks``.
        channels: by member index: to the coordinator (index 0), or on the coordinator to all others.
        communicator: the data plane among these ranks.
        watch: hears of failures and knows who is alive.
        on_stopped: called on the worker thread when the set was shut down in good order, with the rank that left, its
            reason, and whether this rank was waiting for something.
        placement: where the worker thread runs.
        express: for small collectives among ranks of one host.

    Attributes:
        finished: it has ended in good order, on all ranks.
        unnamed: how many calls without a name were made on this process set, by kind.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        index: int,
        channels: Mapping[int, Channel],
        communicator: Communicator,
        config: Config,
        watch: Watch,
        on_stopped: Callable[[int, str, bool], None],
        placement: Placement = ANYWHERE,
        proposals: Proposals | None = None,
    ) -> None:
        self.ranks = list(ranks)
        self.index = index
        self.communicator = communicator
        self.unnamed: Counter[str] = Counter()
        self._connections = Connections(channels)
        self._config = config
        self._watch = watch
        self._on_stopped = on_stopped
        self._placement = placement
        self._requests = InFlight(None if config.cycle_time else self)
        self._due: deque[Sequence[Decision]] = deque()
        self._stopping: tuple[int, str] | None = None
        self._left = threading.Event()
        self._leaving: str | None = None
        self._said_leave = False
        self.finished = False
        self._progress = Progress(self._connections, placement.spins, index == 0)
        self._proposals = proposals
        self._fast_path: FastPath | None = None
        if proposals is not None:
            self._fast_path = FastPath(proposals, self._requests, self.ranks, index, self._connections, placement.spins)
        self._probe_seconds = config.timeout.total_seconds() / 3
        self._next_probe = 0.0
        self._thread = threading.Thread(target=self._run, name=f"horovod-worker-{name}", daemon=True)

    # For any thread.

    def start(self) -> None:
        self._thread.start()

    def submit(self, entry: Entry, held: bool = False, awaited: bool = False) -> None:
        """Queue a request; never blocks on peers.

        Args:
            held: its inputs are not there yet, so it is announced by :meth:`release` only.
            awaited: the calling thread calls ``entry.handle.wait()`` next, so a sleeping worker thread need not be
            woken for it.

        Raises:
            ValueError: a request of that name is in flight on this rank.
            HorovodInternalError: the job has failed or was shut down; no thread uses the tensors of other requests any more.
        """
        if self._requests.add(entry, held, awaited):
            self._connections.ring()

    def release(self, entry: Entry, error: BaseException | None = None) -> None:
        """The inputs of a held request are there, or will never come, because of ``error``; then it fails on this rank.

        Does nothing if it has failed meanwhile.
        """
        if error is not None:
            if self.withdraw(entry):
                entry.handle.complete(error)
            return
        entry.since = time.monotonic()
        if self._requests.release(entry):
            self._connections.ring()

    def withdraw(self, entry: Entry) -> bool:
        """Forget a held request; False if it has failed already."""
        return self._requests.withdraw(entry)

    def leave(self, reason: str) -> None:
        """Ask for an orderly end: what is decided still runs, what is not fails. Then the thread ends on every rank."""
        self._leaving = reason
        self._connections.ring()

    # An abort has three steps, because an error must not be reported while a tensor may still be written: whoever gets it
    # may use the memory for something else at once.

    def interrupt(self) -> None:
        """Take no more requests, and wake the thread out of whatever it does; returns at once."""
        self._requests.close()
        self.communicator.abort()
        self._connections.ring()

    def await_exit(self, seconds: float) -> bool:
        """Wait until no thread of this process uses a request's tensors, after :meth:`interrupt`; False: one still does."""
        if self._thread.ident is None or threading.current_thread() is self._thread:
            return True
        return self._left.wait(max(0.0, seconds))

    def fail(self, error: BaseException) -> None:
        """Complete everything pending with ``error``, and refuse with it whatever is submitted from now on."""
        entries = self._requests.fail(error)
        for entry in entries:
            entry.handle.complete(error)

    def abort(self, error: HorovodInternalError) -> None:
        """All three steps, one after another."""
        self.interrupt()
        if not self.await_exit(self._config.timeout.total_seconds()):
            error = still_in_use(error)
        self.fail(error)

    def join(self, seconds: float) -> bool:
        """Wait for the thread to end; False if it has not within ``seconds``."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Give everything back; or nothing, if the thread could not be got out of a collective and may still use it."""
        if self._thread.is_alive():
            return
        if self._proposals is not None:
            self._proposals.release()
        self.communicator.close()
        self._connections.close()

    def descriptors(self) -> list[int]:
        """What a forked child must close."""
        return [*self._connections.descriptors(), *self.communicator.descriptors()]

    def drive(self, handle: Handle) -> None:
        """Carry out a quick collective on the calling thread, which waits for it, as far as that is quick."""
        self._progress.drive(handle, self._try_fast_path, self._quick_step)

    def expedite(self, handle: Handle) -> None:
        """Have the worker thread take the turns until this is done, if it leaves them to others."""
        if self._requests.expedite(handle):
            self._connections.ring()

    def _try_fast_path(self, handle: Handle) -> bool:
        """Carry out a small collective by fast path, if nothing else is under way; whether it is done."""
        if self._fast_path is None or not self._fast_path_open():
            return False
        entry = self._fast_path.carry_out(handle)
        if entry is None:
            return False
        self._done(entry)
        return True

    def _quick_step(self, ready: ReadyConnections) -> bool:
        if ready.readable or self._requests.waiting():
            self._step(ready, driven=True)
            if self._due or self._stopping is not None or self._connections.unsent():
                return True
        return self.finished or self._requests.closed

    # On the worker thread.

    def _run(self) -> None:
        self._placement.begin()
        failure = self._serve()
        self._progress.end()
        self._left.set()
        if not self.finished:
            self._await_failure(failure)

    def _serve(self) -> str:
        """Take turns until the end. Returns what went wrong in this worker thread, "" where nothing has; it is reported
        then."""
        try:
            with np.errstate(
                all="ignore"
            ):  # an overflow in a gradient is the user's to find, not a warning from a thread
                while not self.finished and not self._requests.closed:
                    self._stand_by()
                    self._progress.take(self._wait(), self._step)
            return ""
        except PeerFailure as failure:
            self._watch.report(self.ranks[failure.rank], failure.reason, failure.suspected)
            return f"rank {self.ranks[failure.rank]}: {failure.reason}"
        except Aborted:
            return "a collective was aborted"
        except Exception as error:
            _log.exception("rank %d: the worker thread of process set %s failed", self.ranks[self.index], self.ranks)
            self._watch.report(self.ranks[self.index], f"its worker thread failed: {error!r}")
            return f"rank {self.ranks[self.index]}: its worker thread failed: {error!r}"

    def _await_failure(self, reason: str) -> None:
        """Whoever aborts, or the failure on what was reported, fails what is pending. Should neither come, this does."""
        if not self._requests.failed.wait(2 * self._config.timeout.total_seconds()):
            self.fail(HorovodInternalError(f"Horovod: {reason}. Rank 0 has not said in time which rank failed first."))

    def _stand_by(self) -> None:
        """While other threads take turns, leave the connections to them."""
        for _ in range(STANDBYS):
            if not self._progress.driven():
                return
            if not self._requests.stand_by():
                return
            rung = self._connections.listen(STANDBY_MILLISECONDS)
            self._requests.rise()
            if rung:
                return

    def _wait(self) -> ReadyConnections:
        if self._placement.spins and self._requests.latest.awaited():
            for _ in range(POLLS_BEFORE_SLEEP):
                ready = self._connections.look(0)
                if ready.readable or ready.rung or self._requests.waiting():
                    return ready
        limit: float | None = self._requests.rest(busy=self._leaving is not None and not self._said_leave)
        ready = self._connections.look(self._progress.between(self._milliseconds) if limit == -1 else limit)
        self._requests.rise()
        return ready

    def _step(self, ready: ReadyConnections, driven: bool = False) -> None:
        """Do everything there is to do now.

        Args:
            driven: by a thread that waits for a quick collective: what is large, or the last, stays for the worker thread.
        """
        if self._requests.closed:
            return
        leaving = self._leaving is not None and not self._said_leave
        submitted = self._requests.take()
        if submitted:
            self._announce([entry.request for entry in submitted])
            self._requests.announced(nap=not driven)
        for member in ready.writable:
            if member in self._connections:
                self._connections.flush(member)
        for member in ready.readable:
            if member not in self._connections:
                continue
            try:
                for body in self._connections.receive(member):
                    self._receive(member, body)
            except ChannelClosed as error:
                self._lost(member, f"its control connection broke ({error})")
                return
            except (MessageError, NegotiationError) as error:
                self._lost(member, f"it broke the protocol ({error})")
                return
        if leaving:
            self._said_leave = True
            self._say_leave(self._leaving or "")
        self._decide()
        while self._due:
            batch = self._batch(self._due[0])
            if driven and not may_drive(batch):
                return
            self._due.popleft()
            if driven or size_of(batch) <= QUICK_BYTES:
                self._execute(batch)
            else:
                with self._placement.at_work():
                    self._execute(batch)
        if self._stopping is not None and not driven:
            self._before_stop(*self._stopping)
            self._stop(*self._stopping)

    def _milliseconds(self) -> float | None:
        """How long this worker thread may sleep: without end, unless somebody waits for an answer."""
        oldest = self._requests.oldest()
        if oldest is None:
            return None
        now = time.monotonic()
        due = max(oldest.since + self._probe_seconds, self._next_probe)
        if now >= due:
            self._watch.probe()
            self._next_probe = due = now + self._probe_seconds
        return max(1.0, (due - now) * 1000)

    def _lost(self, member: int, reason: str) -> None:
        """A connection is of no more use: stop listening to it, let the liveness monitor find out what happened."""
        if self._connections.drop(member):
            self._watch.report(self.ranks[member], reason, suspected=True)

    def _batch(self, decisions: Sequence[Decision]) -> Batch:
        entries = self._requests.find(decision.name for decision in decisions)
        if self._requests.closed:
            raise Aborted
        return list(zip(decisions, entries, strict=True))

    def _run_batch(self, batch: Batch) -> None:
        failure = batch[0][0].error
        if not failure:
            execute(self.communicator, self.ranks, batch)
        self._complete(batch, HorovodInternalError(failure) if failure else None)

    def _done(self, entry: Entry) -> None:
        """A request was carried out without an order."""
        for known in self._requests.finish([entry.request.name]):
            if known is not None:  # else an abort has completed it
                known.handle.complete(known.error)

    def _complete(self, batch: Batch, error: BaseException | None) -> None:
        entries = self._requests.finish(decision.name for decision, _ in batch)
        if self._requests.none():
            self._at_rest()
        for entry in entries:
            if entry is not None:  # an abort has completed it, or this rank has joined
                entry.handle.complete(error or entry.error)

    def _stop(self, rank: int, reason: str) -> None:
        """Everything ordered before has run; what is still pending never will."""
        self.finished = True
        pending = self._requests.oldest()
        if pending is not None:
            reason += f" while rank {self.ranks[self.index]} waited for {pending.request.name!r}"
        self.fail(HorovodInternalError(f"{SHUT_DOWN} This was caused by rank {rank}: {reason}."))
        self._on_stopped(rank, reason, pending is not None)

    def _fast_path_open(self) -> bool:
        """Whether small collectives may be carried out without an order now."""
        return True

    @abstractmethod
    def _at_rest(self) -> None:
        """Everything that was announced is done."""

    @abstractmethod
    def _announce(self, requests: list[Request]) -> None:
        """Tell the coordinator what this rank submitted."""

    @abstractmethod
    def _receive(self, member: int, body: bytes) -> None:
        """Take one message."""

    @abstractmethod
    def _say_leave(self, reason: str) -> None:
        """Tell the coordinator that this rank shuts down."""

    @abstractmethod
    def _decide(self) -> None:
        """Find out what is due after the messages of this turn."""

    @abstractmethod
    def _execute(self, batch: Batch) -> None:
        """Run what is due."""

    @abstractmethod
    def _before_stop(self, rank: int, reason: str) -> None:
        """What is still to be said when everything has run."""
