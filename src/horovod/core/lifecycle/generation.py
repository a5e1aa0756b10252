"""One generation of the runtime, from ``init()`` to ``shutdown()``: its connections, its worker threads, its liveness monitor.

``core.lifecycle.context`` holds the running one. It begins in three steps: the ranks meet, connect, and start their
worker threads. It ends in good order (:meth:`Generation.stop`) or with a failure (``core.lifecycle.termination``); then
everything is given back.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from horovod.control.channel import Channel
from horovod.control.liveness_monitor import LivenessMonitor
from horovod.control.mesh import ConnectionKey, Endpoint, Mesh
from horovod.control.processes import why_not_running
from horovod.control.reachability import TRIAL_SECONDS, UnreachableError, find_unreachable
from horovod.control.rendezvous_point import RendezvousPoint
from horovod.control.secret import make_secret
from horovod.core.config import AUTOTUNE, Config
from horovod.core.coordination.messages import Operation
from horovod.core.errors import SHUT_DOWN, HorovodInternalError
from horovod.core.execution.cpu_affinity import ANYWHERE, crowded, own_cpu_resources, placement_of
from horovod.core.execution.worker import Watch, WorkerThread
from horovod.core.lifecycle import crash, elastic_process
from horovod.core.lifecycle.assembly import assemble, control_connections
from horovod.core.lifecycle.initial_process_sets import RequestedSet, StaticSets, settle
from horovod.core.lifecycle.recording import Recording
from horovod.core.lifecycle.rendezvous import (
    RankInfo,
    check_settings,
    compare_findings,
    exchange_rank_infos,
    rendezvous_point,
)
from horovod.core.lifecycle.termination import NobodyElse, Termination
from horovod.core.lifecycle.world import World, place_by_hosts
from horovod.core.process_set import membership
from horovod.observe import call_site

_log = logging.getLogger("horovod.core")

LIVENESS = "liveness"


class Generation:
    """A running job, as one of its ranks sees it.

    Args:
        world: who takes part.
        earlier: the highest number of a generation in this process so far.
        attempt: how often these ranks have met before.

    Attributes:
        identity: this rank's place in the job.
        config: the settings in force.
        generation: its number, the same on all ranks and higher than that of any earlier one.
        worker threads: by process set id, the worker threads of the sets this rank is a member of.
        ending: what ended it, if it has ended.
        recording: its timeline.
        secret: of the job, for connections that are made later.
        watch: what worker threads report failures to.
        crowded: on some host the ranks compute with as many threads as there are cores, so that none is free for
            communication; the same on all ranks.
        placement: of the threads of this rank's worker threads.
        freed, changes: process set ids to be used again, and how often sets were added or removed.
        process: the process that started it; a forked child's copy is of no use.
    """

    def __init__(self, world: World, config: Config, earlier: int = 0, attempt: int = 1) -> None:
        self.world = world
        self.identity = world.identity
        self.config = config
        self.generation = earlier + 1
        self.workers: dict[int, WorkerThread] = {}
        self.termination = Termination(self.identity.rank, self.workers, config.timeout.total_seconds())
        self.recording = Recording(config, self.identity.rank, self.workers)
        self.process = os.getpid()
        self.secret = b""
        self.crowded = False
        self.placement = ANYWHERE
        self.watch: Watch = NobodyElse(self.termination)
        self.freed: list[int] = []
        self.changes = 0
        self._attempt = attempt
        self._endpoints: list[Endpoint] = []
        self._monitor: LivenessMonitor | None = None
        self._abandoned = False
        self._sockets: list[socket.socket] = []

    @property
    def addresses(self) -> Sequence[str]:
        """Of this rank, as far as other hosts reach it there."""
        return self._endpoints[self.identity.rank].addresses

    @property
    def stopped(self) -> HorovodInternalError | None:
        """Why nothing can be submitted any more, or None."""
        return self.termination.error

    # Life

    def start(self, process_sets: Sequence[RequestedSet] = ()) -> StaticSets:
        """Meet the other ranks, connect, and start the worker threads; every rank of the job must call it.

        Raises:
            ValueError: the ranks contradict each other.
            TimeoutError, RuntimeError: they did not find each other; the message says who is missing.
        """
        deadline = time.monotonic() + self.config.start_timeout.total_seconds()
        mesh = self._mesh()
        process = elastic_process.this_process()
        try:
            if process is not None and mesh is not None:
                process.call_when_over(mesh.cancel)
            rank_infos = self._meet(mesh, process_sets)
            self._check_ways(mesh, deadline)
            sets = settle([each.process_sets for each in rank_infos], self.identity.rank)
            groups = dict(enumerate([list(range(self.identity.size)), *sets.ranks]))
            self._connect(mesh, groups, deadline)
        finally:
            if process is not None:
                process.call_when_over(None)
            if mesh is not None:
                mesh.close()
        membership.rank = self.identity.rank
        membership.ranks = groups
        if self.config.autotune and self.identity.rank == 0:
            _log.warning("%s is set, but this version has no autotuning; it is ignored", AUTOTUNE)
        return sets

    def _mesh(self) -> Mesh | None:
        if self.identity.size == 1:
            return None  # nobody to connect to
        identity, interface = self.identity, self.config.network_interface
        if self.world.communicator is None:
            self.termination.place = rendezvous_point(self.world.launched)
        return Mesh(identity.rank, identity.hostname, self.world.on_this_host, interface)

    def _meet(self, mesh: Mesh | None, process_sets: Sequence[RequestedSet]) -> list[RankInfo]:
        """Get to know the others, and what all have to agree on."""
        identity, place = self.identity, self.termination.place
        endpoint = Endpoint(identity.rank, identity.hostname, os.getpid(), 0, (), "") if mesh is None else mesh.endpoint
        if identity.rank == 0 and (place is None or (isinstance(place, RendezvousPoint) and place.hosted)):
            # no launcher gave the job a secret, and nobody else sees this card
            endpoint = msgspec.structs.replace(endpoint, secret=make_secret())
        cpu_resources = own_cpu_resources(identity.hostname)
        own = RankInfo(
            endpoint,
            self.world.launched.rank,
            self.generation,
            list(process_sets),
            cpu_resources,
            self.config.common(),
            self.world.launched.node or identity.hostname,
        )
        seconds = self.config.start_timeout.total_seconds()
        rank_infos = exchange_rank_infos(own, self.world, place, self._attempt, seconds)
        check_settings([each.settings for each in rank_infos])
        self._endpoints = [each.endpoint for each in rank_infos]
        self.termination.rank_infos = rank_infos
        self.generation = max(each.generation for each in rank_infos)
        cpu_resources_by_rank = [each.cpu_resources for each in rank_infos]
        self.crowded = crowded(cpu_resources_by_rank)
        self.secret = self._endpoints[0].secret or (place.secret if place is not None else b"")
        if not (self.world.is_launched_job and identity.placed):
            self.identity = place_by_hosts(identity, [each.node for each in rank_infos])
        asked, local_rank = self.config.thread_affinity, self.identity.local_rank
        core = asked[local_rank] if local_rank < len(asked) else None
        self.placement = placement_of(cpu_resources_by_rank, self.identity.rank, core)
        return rank_infos

    def _check_ways(self, mesh: Mesh | None, deadline: float) -> None:
        """Find out whether the hosts reach each other before ranks wait for one another, and by which addresses."""
        if mesh is None or self.world.on_this_host or len({endpoint.host for endpoint in self._endpoints}) == 1:
            return
        left = max(0.1, deadline - time.monotonic())
        found = find_unreachable(mesh.endpoint, self._endpoints, min(TRIAL_SECONDS, left / 2))
        try:
            self._endpoints = compare_findings(
                found, self._endpoints, self.world, self.termination.place, self._attempt, left
            )
        except UnreachableError as error:
            self.termination.cannot_begin(error.rank, str(error))
            raise
        for host, failed in found.items():
            for address, why in failed.items():
                _log.warning(
                    "no rank uses address %s of %s: %s cannot reach it (%s)", address, host, mesh.endpoint.host, why
                )
        mesh.keep_to(self.addresses)

    def _connect(self, mesh: Mesh | None, groups: Mapping[int, list[int]], deadline: float) -> None:
        """Connect to those this rank has to do with, and start the worker threads of its process sets."""
        rank, size = self.identity.rank, self.identity.size
        mine = {group: ranks for group, ranks in groups.items() if rank in ranks}
        sockets: dict[ConnectionKey, socket.socket] = {}

        def connect(keys: list[ConnectionKey]) -> dict[ConnectionKey, socket.socket]:
            assert mesh is not None
            return mesh.connect(self._endpoints, keys, str(self.generation), self.secret, deadline)

        if mesh is not None:
            keys = [key for group, ranks in mine.items() for key in control_connections(group, ranks, rank)]
            keys += [ConnectionKey(peer, LIVENESS, 0) for peer in (range(1, size) if rank == 0 else [0])]
            sockets = connect(keys)
            self._sockets = list(sockets.values())
            self.watch = self._monitor = self._make_monitor(sockets)
        for group, ranks in mine.items():
            self.workers[group] = assemble(
                group,
                ranks,
                rank,
                self.placement,
                self._endpoints,
                sockets,
                connect,
                self.config,
                self.watch,
                self.termination.left,
                deadline,
            )
        self.recording.begin()
        if self._monitor is not None:
            self._monitor.start()
        for worker in self.workers.values():
            worker.start()

    def _make_monitor(self, sockets: Mapping[ConnectionKey, socket.socket]) -> LivenessMonitor:
        timeout = self.config.timeout.total_seconds()  # who waits asks after a third of it
        return LivenessMonitor(
            self.identity.rank,
            {
                key.peer: Channel(made, reach_seconds=timeout * 2 / 3)
                for key, made in sockets.items()
                if key.role == LIVENESS
            },
            timeout / 3,
            self.config.stall_limit.total_seconds(),
            call_site.main_thread,
            self._look,
            self.termination.who,
            self.termination.fail,
        )

    def _look(self, rank: int) -> str | None:
        """Why a rank cannot answer, or "" if its process runs; None if this process cannot see it."""
        own, other = self._endpoints[self.identity.rank].process_namespace, self._endpoints[rank]
        return why_not_running(other.pid) if own and own == other.process_namespace else None

    def discard(self) -> None:
        """Give back what a failed :meth:`start` has taken. No thread runs yet."""
        for worker in self.workers.values():
            worker.close()
        self.recording.stop()
        if self._monitor is not None:
            self._monitor.leave()
        for made in self._sockets:
            made.close()

    def stop(self) -> None:
        """End this generation: leave in good order, or at once if the job has failed. Gives everything back."""
        raised = crash.unhandled()
        if raised and self._monitor is not None and self.stopped is None:
            self._monitor.report(self.identity.rank, raised)
            self.termination.failed.wait(5.0)
        if crash.ended_by_the_job():
            self.termination.blame_leaver()
        deadline = time.monotonic() + self.config.timeout.total_seconds()
        for worker in self.workers.values():
            worker.leave("it left the job (hvd.shutdown() or the end of its script)")
        for worker in self.workers.values():
            self._await_end(worker, deadline)
        if self._monitor is not None:
            self._monitor.leave()
        self.recording.stop()
        for worker in self.workers.values():
            worker.close()
        self.workers.clear()

    def end_worker(self, group: int, reason: str) -> None:
        """End one process set's worker thread; all its members do.

        Raises:
            HorovodInternalError: the job has failed meanwhile.
        """
        worker = self.workers[group]
        worker.leave(reason)
        self._await_end(worker, time.monotonic() + self.config.timeout.total_seconds())
        del self.workers[group]  # not before: a failure must find it as long as it may wait for a rank that is lost
        worker.close()
        if self.termination.failure is not None and not worker.finished:
            raise HorovodInternalError(*self.termination.failure.args)

    def _await_end(self, worker: WorkerThread, deadline: float) -> None:
        if not worker.join(max(0.1, deadline - time.monotonic())):
            _log.warning(
                "rank %d: process set %s did not end in good order within %g seconds",
                self.identity.rank,
                worker.ranks,
                self.config.timeout.total_seconds(),
            )
            worker.abort(HorovodInternalError(SHUT_DOWN))
            worker.join(1.0)

    # Use

    def worker(self, process_set_id: int | None, operation: int) -> WorkerThread:
        """The worker thread of a process set, for submitting an ``Operation``.

        Raises:
            ValueError: the set is not registered, or this rank is not a member.
            HorovodInternalError: this process is a forked child.
        """
        if self._abandoned:
            raise HorovodInternalError(
                f"this process was forked from rank {self.identity.rank} and cannot communicate for it; "
                "call collectives in the process that called hvd.init()"
            )
        worker = self.workers.get(-1 if process_set_id is None else process_set_id)
        if worker is None:
            what = Operation(operation).name.capitalize()
            if process_set_id not in membership.ranks:
                raise ValueError(f"{what}: Process set provided does not exist, or has not been registered.")
            raise ValueError(f"{what}: Rank {self.identity.rank} is not a member of the provided process set.")
        return worker

    def is_homogeneous(self) -> bool:
        """Whether every host runs the same number of ranks."""
        return len(set(Counter(endpoint.host for endpoint in self._endpoints).values())) <= 1

    def auto_name(self, prefix: str, process_set_id: int | None) -> str:
        """A name for a request that has none: the n-th such call of all members of the set belongs together."""
        unnamed = self.workers[-1 if process_set_id is None else process_set_id].unnamed
        unnamed[prefix] += 1
        return f"{prefix}.noname.{unnamed[prefix]}"

    def everybody_joined(self) -> None:
        """Called by the thread that joined, on every rank: as the ranks may have made different numbers of unnamed calls until
        now, their counting starts anew."""
        self.workers[0].unnamed.clear()

    def abandon(self) -> None:
        """In a forked child: close what was inherited, so that this process neither uses nor holds the parent's connections."""
        if self._abandoned:
            return  # a child of a forked child: by now the numbers may stand for files of its own
        self._abandoned = True
        descriptors = [descriptor for worker in self.workers.values() for descriptor in worker.descriptors()]
        if self._monitor is not None:
            descriptors += self._monitor.descriptors()
        for descriptor in descriptors:
            try:
                os.close(descriptor)
            except OSError:
                pass  # closed in the parent at the moment of the fork
