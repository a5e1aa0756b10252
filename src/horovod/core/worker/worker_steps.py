"""What a worker does in one step: it announces submissions, receives messages, and carries out what was ordered.

A step is taken by the worker thread, or by a thread that waits for a quick collective, one thread at a time
(:mod:`horovod.core.worker.driving_threads`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from horovod.autotune.kept import Tuned
from horovod.comm.base import Aborted, Communicator
from horovod.control.channel import ChannelClosed
from horovod.core.negotiation.messages import MessageError, StepsMade, Stop
from horovod.core.negotiation.ready_request import NegotiationError
from horovod.core.worker.connections import Connections, ReadyConnections
from horovod.core.worker.driving_threads import may_drive
from horovod.core.worker.executor import Executor
from horovod.core.worker.in_flight import InFlight
from horovod.core.worker.role import Role, Schedule, Watch

_LOOK_SECONDS = 0.2
"""The interval at which a thread that waits for space in a socket checks whether the job has failed."""


class WorkerSteps:
    """The steps of one worker. All methods but :meth:`leave` are for the thread that drives it.

    Args:
        ranks: the members' global ranks, in set order.
        children: the members that get their orders through this one.
        requests, connections, schedule, role, executor, communicator, watch: of the worker.
        stopped: called when the set ends without a failure, after all ordered batches have run.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        children: Collection[int],
        requests: InFlight,
        connections: Connections,
        schedule: Schedule,
        role: Role,
        executor: Executor,
        communicator: Communicator,
        watch: Watch,
        stopped: Callable[[Stop], None],
    ) -> None:
        self._ranks = ranks
        self._children = children
        self._requests = requests
        self._connections = connections
        self._schedule = schedule
        self._role = role
        self._executor = executor
        self._communicator = communicator
        self._watch = watch
        self._stopped = stopped
        self._leaving: tuple[str, Sequence[StepsMade]] | None = None
        self._said_leave = False

    def leave(self, reason: str, steps: Sequence[StepsMade]) -> None:
        """Say in the next step that this rank leaves. For any thread, which must wake the worker afterwards."""
        self._leaving = reason, steps

    def about_to_leave(self) -> bool:
        """Whether the next step says that this rank leaves."""
        return self._leaving is not None and not self._said_leave

    def take(self, ready: ReadyConnections, driven: bool = False) -> None:
        """Do everything there is to do now.

        Args:
            driven: by a waiting thread. Large batches and the orderly end are left to the worker thread.
        """
        if self._requests.closed:
            return
        leaving = None if self._said_leave else self._leaving
        if self._announce_submissions():
            self._requests.announced(coalesce=not driven)
        for member in ready.writable:
            if member in self._connections:
                self._connections.flush(member)
        for member in ready.readable:
            if member in self._connections and not self._receive(member):
                return
        if leaving is not None:
            self._said_leave = True
            self._role.leave(*leaving)
        self._role.decide()
        if self._schedule.batches:
            self._executor.agreed = time.monotonic()
        while self._schedule.batches:
            ordered = self._schedule.batches[0]
            if isinstance(ordered, Tuned):
                self._schedule.batches.popleft()
                self._executor.tune(ordered)
                continue
            if self._connections.unsent() and not self._orders_are_sent(driven):
                return
            batch = self._requests.batch(ordered)
            if self._requests.closed:
                raise Aborted
            if driven and not (self._communicator.any_thread and may_drive(batch)):
                return
            self._schedule.batches.popleft()
            with self._role.record(batch):
                self._executor.carry_out(batch, driven)
            if self._role.announces_between_batches and self._announce_submissions():
                self._role.decide()
        if self._schedule.stop is not None and not driven:
            self._role.stop(self._schedule.stop)
            self._stopped(self._schedule.stop)

    def _orders_are_sent(self, driven: bool) -> bool:
        """Wait until the ranks that get a batch through this one can take part in it. False: take another step first.

        A long order does not fit into a socket. This rank would wait in the batch for ranks that have only a part of its order.
        """
        while not self._connections.flush_some(self._children, 0.0 if driven else _LOOK_SECONDS):
            if driven or self._requests.closed:
                return False
        return True

    def _announce_submissions(self) -> bool:
        """Announce what was submitted since the last time; False if nothing was."""
        submitted = self._requests.take()
        if submitted:
            self._role.announce([entry.request for entry in submitted], [entry.since for entry in submitted])
        return bool(submitted)

    def _receive(self, member: int) -> bool:
        """Take the messages of a member; False if its connection has ended."""
        try:
            for body in self._connections.receive(member):
                self._role.receive(member, body)
        except ChannelClosed as error:
            self._lost(member, error.network or f"its control connection broke ({error})", suspected=not error.changed)
            return False
        except (MessageError, NegotiationError) as error:
            self._lost(member, f"it broke the protocol ({error})")
            return False
        return True

    def _lost(self, member: int, reason: str, suspected: bool = True) -> None:
        """Close a connection. The liveness monitor finds out which rank failed, unless the reason is certain; it hears of it
        first, because the peer asks about a connection that has ended."""
        if member in self._connections:
            self._watch.report(self._ranks[member], reason, suspected=suspected)
            self._connections.drop(member)
