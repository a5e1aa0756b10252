"""The worker of one process set on one rank: announces submissions, receives orders, carries them out one by one.

One thread does all of it. While a collective runs, it need do nothing else: requests that become ready meanwhile wait in the
sockets, and form the next batch. Other threads append to a queue and return. The worker thread sleeps in one ``poll`` of its
connections and its wake-up, without a timeout while nothing is in flight (:mod:`horovod.core.worker.waiting`).

The worker works in steps (:mod:`horovod.core.worker.worker_steps`). A thread that waits for a quick collective may take steps,
too, one thread at a time (:mod:`horovod.core.worker.driving_threads`). Large collectives and the orderly end are left to the
worker thread.

The messages of a step depend on the worker's role (:mod:`horovod.core.worker.role`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from horovod._base.config import Config
from horovod._base.running_time import running_time
from horovod._base.signal_deferral import with_signals_deferred
from horovod.autotune.tuner import Tuner
from horovod.comm.base import Aborted, Communicator, DeviceFailure, PeerFailure
from horovod.comm.shm.proposals import Proposals
from horovod.control.channel import Channel
from horovod.control.failure import ENGINE, TIME_LIMIT
from horovod.core.errors import HorovodInternalError, RankLostError, shut_down_by
from horovod.core.negotiation.messages import Request, StepsMade, Stop
from horovod.core.negotiation.tree import COORDINATOR, Tree
from horovod.core.requests.batch import Entry
from horovod.core.requests.handle import Handle
from horovod.core.worker.conditional_calls import ConditionalCalls
from horovod.core.worker.connections import Connections, ReadyConnections
from horovod.core.worker.coordinator import Coordinator
from horovod.core.worker.cpu_affinity import ANYWHERE, CpuPlacement
from horovod.core.worker.driving_threads import DrivingThreads
from horovod.core.worker.executor import Executor
from horovod.core.worker.fast_path import FastPath
from horovod.core.worker.in_flight import InFlight
from horovod.core.worker.liveness_probes import LivenessProbes
from horovod.core.worker.member import Member
from horovod.core.worker.observer import Observer
from horovod.core.worker.relay import Relay
from horovod.core.worker.role import Role, Schedule, Watch
from horovod.core.worker.waiting import STANDBY_MILLISECONDS, STANDBY_ROUNDS, polls
from horovod.core.worker.worker_steps import WorkerSteps

_log = logging.getLogger("horovod.core")


def still_in_use(error: HorovodInternalError, why: str) -> HorovodInternalError:
    """``error`` with a warning not to use the tensors' memory again."""
    return error.extended(
        f"{why}, so the tensors of collectives that were in flight may still be read and written: end this process instead of "
        "using them again."
    )


class WorkerThread:
    """The queue, the connections, the engine and the thread of one process set on this rank.

    Args:
        name: the name of the process set, for the thread's name.
        ranks: the members' global ranks, in set order.
        index: this rank's index in ``ranks``; 0 is the coordinator.
        channels: by member index, to the members with which the tree connects this rank.
        communicator: the engine that moves the data of these ranks.
        watch: the liveness monitor, which takes reports of failures.
        on_stopped: called on the worker thread when the set was shut down without a failure, with the rank that left, its
            reason, and whether this rank still waited for a collective.
        placement: the cores that the thread runs on.
        proposals: the shared memory of the fast path; None if the ranks share none.
        tree: the tree of the members' connections; None: all members are connected with the coordinator.
        observer: what observes the workers of this rank.
        tuner: as for :class:`Coordinator`.

    Attributes:
        role: coordinator, relay or member.
        finished: whether the set has ended without a failure, on all ranks.
        farewell: the last message of the first rank to leave; None before, and if a thread of this rank waited for a collective
            that has failed because of it.
        unnamed: by kind, the number of calls without a name on this process set.
        registration: a number that distinguishes this process set from another of the same ranks; the same on all members.
        executor: carries out the batches.
        completed_calls: how many calls the members have completed, for a group that goes on after a loss; None if the members
            share no memory.
        recorder: of the last collectives of these ranks; None for no recording.
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
        placement: CpuPlacement = ANYWHERE,
        proposals: Proposals | None = None,
        tree: Tree | None = None,
        observer: Observer | None = None,
        tuner: Tuner | None = None,
    ) -> None:
        observer = observer or Observer()
        tree = tree or Tree.flat(len(ranks))
        self.ranks = list(ranks)
        self.index = index
        self.communicator = communicator
        self.registration = 0
        self.finished = False
        self.farewell: Stop | None = None
        self._config = config
        self._watch = watch
        self._on_stopped = on_stopped
        self._placement = placement
        self._polls = polls(placement.spins)
        self._connections = Connections(channels)
        self.recorder = observer.recorder(config.flight_recorder_size)
        self._requests = InFlight(None if config.cycle_time else self, self.recorder)
        self._schedule = Schedule()
        children = frozenset(tree.children(index))
        self._driving = DrivingThreads(self._connections, self._polls, bool(children))
        self._proposals = proposals
        self.completed_calls = None if proposals is None else proposals.completed_calls(self._polls.word)
        coordinator: Coordinator | None = None
        if index == COORDINATOR:
            coordinator = Coordinator(
                self.ranks,
                self._connections,
                self._schedule,
                proposals,
                config,
                watch,
                communicator.name,
                tree,
                observer,
                tuner,
            )
        self.executor = Executor(
            self.ranks,
            communicator,
            self._requests,
            placement,
            config.nccl_timeout.total_seconds(),
            self.recorder,
            watch.disagreed,
            (lambda: None) if coordinator is None else coordinator.settled,
        )
        fast_path: FastPath | None = None
        if proposals is not None:
            fast_path = FastPath(
                proposals,
                self._requests,
                self.ranks,
                index,
                self._connections,
                self._polls,
                self.executor,
                coordinator,
            )
        self._fast_path = fast_path
        self.role: Role
        if coordinator is not None:
            self.role = coordinator
        elif children:
            seconds = config.timeout.total_seconds() / 3
            capacity, group = config.cache_capacity, tree.group(index)
            self.role = Relay(self._connections, self._schedule, capacity, group, self.ranks, seconds)
        else:
            self.role = Member(self._connections, self._schedule, fast_path, config.cache_capacity, tree.parent(index))
        self._conditional_calls = ConditionalCalls(ranks[index]) if config.debug and name == "0" else None
        self._left = threading.Event()
        self._steps = WorkerSteps(
            self.ranks,
            children,
            self._requests,
            self._connections,
            self._schedule,
            self.role,
            self.executor,
            communicator,
            watch,
            self._stop,
        )
        self._probes = LivenessProbes(watch.probe, config.timeout)
        self._thread = threading.Thread(target=self._run, name=f"horovod-worker-{name}", daemon=True)

    def __repr__(self) -> str:
        return f"WorkerThread(member {self.index} of ranks {self.ranks}, {self._requests.pending()} in flight)"

    # For any thread.

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, entry: Entry, held: bool = False, awaited: bool = False) -> None:
        """Queue a request. Never waits for peers.

        Args:
            held: its inputs have not arrived yet, so it is not announced before :meth:`release`.
            awaited: the calling thread calls ``entry.handle.wait()`` next, so a sleeping worker thread need not be woken.

        Raises:
            ValueError: a request of that name is in flight on this rank.
            HorovodInternalError: the job has failed or was shut down; no thread uses the tensors of other requests any more.
            the exception of a signal handler: then the request is either not in flight, or it is carried out like any other.
        """
        if self._conditional_calls is not None:
            self._conditional_calls.look(entry.request)
        try:
            if self._requests.add(entry, held, awaited):
                self._connections.wake()
        except BaseException:
            self._connections.wake()
            raise

    def number(self, request: Request) -> Request:
        """Count the call of a request that is submitted later, if it has no name; the request as it is to be submitted."""
        return self._requests.number(request)

    def count_from(self, request: Request, made: int) -> None:
        """Give the next call without a name the number after ``made``; all members must do the same."""
        self._requests.count_from(request, made)

    def count_anew(self) -> None:
        """Reset the counts of calls without a name: until now the members may have made different numbers of them."""
        self._requests.count_anew()

    def release(self, entry: Entry, error: BaseException | None = None) -> None:
        """Announce a held request, whose inputs have arrived. With ``error`` they never will: fail the request on this rank.

        Does nothing if the request has failed meanwhile.
        """
        if error is not None:
            if self.withdraw(entry):
                entry.handle.complete(error)
            return
        entry.since = time.monotonic()
        try:
            if self._requests.release(entry):
                self._connections.wake()
        except BaseException:
            self._connections.wake()
            raise

    def withdraw(self, entry: Entry) -> bool:
        """Remove a held request; False if it has failed or was released already."""
        return self._requests.withdraw(entry)

    def pending(self) -> int:
        """The number of requests in flight."""
        return self._requests.pending()

    def awaited(self) -> list[str]:
        """The names of the collectives that a thread of the script waits for."""
        return self._requests.awaited()

    def entries(self) -> list[Entry]:
        """The requests in flight."""
        return self._requests.entries()

    def latest(self) -> Handle:
        """The handle of the last submission."""
        return self._requests.latest

    def leave(self, reason: str, steps: Sequence[StepsMade] = ()) -> None:
        """Ask for an orderly end: collectives that are decided still run, the others fail. Then the thread ends, on every rank.

        Args:
            steps: the steps of this rank's optimizers, for the other ranks' :attr:`farewell`.
        """
        self._steps.leave(reason, steps)
        self._connections.wake()

    # An abort has three steps, because a script that gets the error may use the tensors' memory for something else:
    #
    # 1. interrupt(): take no more requests, and wake the thread from any wait.
    # 2. await_exit(): wait until nothing uses a tensor.
    # 3. fail(): fail the handles.

    def interrupt(self) -> None:
        """Take no more requests, and wake the thread from any wait. Returns at once."""
        self._requests.close()
        self.executor.abort()
        self._connections.wake()

    def await_exit(self, seconds: float) -> str:
        """After :meth:`interrupt`, wait until nothing uses a request's tensors. Returns a description of what still does; ""
        for nothing."""
        started = self._thread.ident is not None and threading.current_thread() is not self._thread
        if started and not self._left.wait(max(0.0, seconds)):
            return "A thread of this rank (horovod-worker) did not leave a collective in time"
        return self.executor.still_in_use()

    def fail(self, error: BaseException) -> None:
        """Fail everything that is in flight, and all later submissions, with ``error``."""
        self.executor.fail(self._requests.fail(error), error)

    def abort(self, error: HorovodInternalError) -> None:
        """Call :meth:`interrupt`, :meth:`await_exit` and :meth:`fail`."""
        self.interrupt()
        used = self.await_exit(self._config.timeout.total_seconds())
        if used:
            error = still_in_use(error, used)
        self.fail(error)

    def join(self, seconds: float) -> bool:
        """Wait for the thread to end, if it was started; False if it has not ended within ``seconds``."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Release everything. If the thread did not leave a collective, it may still use everything, so nothing is released."""
        if self._thread.is_alive():
            return
        if self._proposals is not None:
            self._proposals.close()
        self.executor.close()
        self._connections.close()

    def descriptors(self) -> list[int]:
        """The descriptors that a forked child must close."""
        shared = [] if self._proposals is None else self._proposals.descriptors()
        return [*self._connections.descriptors(), *self.communicator.descriptors(), *shared]

    def drive(self, handle: Handle) -> None:
        """Carry out a quick collective on the calling thread, which waits for it; or return before it is done."""
        fast_path = self._fast_path
        try_fast_path = None if fast_path is None else fast_path.carry_out
        with_signals_deferred(self._driving.drive, handle, try_fast_path, self._quick_step)

    def take_over(self, handle: Handle) -> None:
        """Make the worker thread carry out a collective that no waiting thread will carry out."""
        if self._requests.leave_to_worker(handle):
            self._connections.wake()

    def _quick_step(self, ready: ReadyConnections) -> bool:
        """A step of a waiting thread; whether anything is left for the worker thread."""
        if ready.readable or self._requests.waiting():
            self._steps.take(ready, driven=True)
            if self._schedule.batches or self._schedule.stop is not None or self._connections.unsent():
                return True
        return self.finished or self._requests.closed

    # On the worker thread.

    def _run(self) -> None:
        self._placement.begin()
        failure = self._serve()
        self._driving.end()
        if self._fast_path is not None:
            self._fast_path.forget()
        self._left.set()
        if not self.finished:
            self._await_failure(failure)

    def _serve(self) -> str:
        """Take steps until the end. Returns and reports the error of this worker; "" if there was none."""
        try:
            with np.errstate(all="ignore"):  # the script must find overflows in gradients
                while not self.finished and not self._requests.closed:
                    self._stand_by()
                    self._driving.take(self._wait(), self._steps.take)
            return ""
        except PeerFailure as failure:
            self._watch.report(self.ranks[failure.rank], failure.reason, failure.suspected)
            return f"rank {self.ranks[failure.rank]}: {failure.reason}"
        except DeviceFailure as failure:
            cause = TIME_LIMIT if failure.timed_out else ENGINE
            self._watch.report(self.ranks[self.index], str(failure), suspected=True, cause=cause)
            return f"rank {self.ranks[self.index]}: {failure}"
        except Aborted:
            return "a collective was aborted"
        except Exception as error:
            _log.exception("rank %d: the worker thread of process set %s failed", self.ranks[self.index], self.ranks)
            self._watch.report(self.ranks[self.index], f"its worker thread failed: {error!r}", cause=ENGINE)
            return f"rank {self.ranks[self.index]}: its worker thread failed: {error!r}"

    def _await_failure(self, reason: str) -> None:
        """Wait until an abort fails what is in flight. If none comes, fail it here."""
        if not self._requests.failed.wait(2 * self._config.timeout.total_seconds()):
            text = f"Horovod: {reason}. Rank 0 did not report in time which rank failed first."
            self.fail(RankLostError(text, reason=reason))

    def _stand_by(self) -> None:
        """Leave the connections to other threads while these drive the worker."""
        for _ in range(STANDBY_ROUNDS):
            if not self._driving.driven() or not self._requests.begin_standby():
                return
            woken = self._connections.poll_wake_up(STANDBY_MILLISECONDS)
            self._requests.end_wait()
            if woken:
                return

    def _wait(self) -> ReadyConnections:
        """Wait for something to do."""
        if self._polls.worker and self._requests.latest.awaited():
            for _ in range(self._polls.worker):
                ready = self._connections.poll(0)
                if ready.readable or ready.woken or self._requests.waiting():
                    return ready
        limit: float | None = self._requests.begin_wait(busy=self._steps.about_to_leave())
        sleep = self._driving.sleep_limit(self._milliseconds) if limit == -1 else limit
        if sleep is None:
            ready = self._connections.poll(None)
        else:
            planned = time.monotonic() + sleep / 1000
            ready = self._connections.poll(sleep)
            running_time.turn(planned, time.monotonic())
        self._requests.end_wait()
        return ready

    def _milliseconds(self) -> float | None:
        """How long this thread may sleep; None: no limit."""
        limits = [self._until_probe(), self.role.milliseconds(), self.executor.look_at_devices()]
        return min([limit for limit in limits if limit is not None], default=None)

    def _until_probe(self) -> float | None:
        """Probe the other ranks if a probe is due. Returns the milliseconds until the next; None if nothing is in flight."""
        oldest = self._requests.oldest()
        return None if oldest is None else max(1.0, self._probes.look(oldest.since) * 1000)

    def _stop(self, stop: Stop) -> None:
        """End without a failure: all ordered batches have run; requests that are still in flight fail."""
        self.finished = True
        rank, reason = stop.rank, stop.reason
        pending = self._requests.oldest()
        if not self._requests.awaited():  # otherwise the script gets the error
            self.farewell = stop
        if pending is not None:
            reason += f" while rank {self.ranks[self.index]} waited for {pending.request.name!r}"
        self.fail(shut_down_by(rank, reason, pending.request.name if pending is not None else ""))
        self._on_stopped(rank, reason, pending is not None)
