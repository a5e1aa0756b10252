"""One generation of the runtime, from ``init()`` to ``shutdown()``: its connections and its worker threads.

``core.lifecycle.context`` holds the running generation. It starts in three steps: the ranks meet
(``core.lifecycle.rank_meeting``), connect, and start their worker threads. It ends in good order (:meth:`Generation.stop`) or
by a failure (``core.lifecycle.termination``). Then everything is released.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

from horovod._base.config import Config
from horovod.comm.engine import MpiRanks
from horovod.comm.mpi import runtime as mpi
from horovod.comm.mpi.engine import MpiEngine
from horovod.control.connection import Connection
from horovod.control.failure import RAISED
from horovod.control.mesh import ConnectionKey, Endpoint, Mesh
from horovod.core.engines.device_engines import DeviceEngines
from horovod.core.errors import SHUT_DOWN, HorovodInternalError, RankLostError
from horovod.core.lifecycle import crash, elastic_process, tuning
from horovod.core.lifecycle.assembly import assemble, control_connections, tree_of
from horovod.core.lifecycle.initial_process_sets import RequestedSet, StaticSets, agree_on_process_sets
from horovod.core.lifecycle.job_summary import job_summary
from horovod.core.lifecycle.late_connections import ListenerSettings
from horovod.core.lifecycle.object_protection import ObjectProtection
from horovod.core.lifecycle.other_processes import OtherProcesses
from horovod.core.lifecycle.process_set import membership
from horovod.core.lifecycle.rank_exchange import JobInfo
from horovod.core.lifecycle.rank_meeting import RankMeeting
from horovod.core.lifecycle.recording import Recording
from horovod.core.lifecycle.steps_made import StepCounts
from horovod.core.lifecycle.termination import NoPeers, Termination
from horovod.core.lifecycle.watching import LIVENESS, Watching, liveness_connections, liveness_tree
from horovod.core.lifecycle.world import World, find_local_ranks
from horovod.core.worker.cpu_affinity import ANYWHERE, placement_of
from horovod.core.worker.observer import Observer
from horovod.core.worker.role import Watch
from horovod.core.worker.worker import WorkerThread

_log = logging.getLogger("horovod.core")

_RECORDED = 1 << 16
"""How many collectives a rank keeps until they are in the timeline of all ranks."""


class Generation:
    """A running job, as one of its ranks sees it.

    Args:
        world: the processes that take part.
        earlier: the number of the last generation in this process.
        calls: the number of calls of ``init()`` with these ranks, including this call.
        start_limit: how long the ranks may take to meet; None: as ``config`` says.

    Attributes:
        identity: this rank's numbers in the job, and its host.
        config: the settings in force.
        generation: its number, the same on all ranks and higher than that of any earlier one.
        workers: by process set id, the worker threads of the sets that this rank is a member of.
        termination: whether and how the generation has ended.
        recording: its timeline.
        observer: observes the workers.
        secret: the secret of the job, for connections that are made later.
        objects: protects pickles on the data plane.
        watch: takes the worker threads' reports of failures.
        crowded: on some host the ranks compute with as many threads as the host has cores, so no core is free for
            communication; the same on all ranks.
        placement: the cores that this rank's worker threads run on.
        mpi: the ranks' numbers in MPI, for engines on MPI.
        device_engine: the engine that moves the memory of GPUs; "" if tensors are staged in host memory.
        buckets_are_tuned: an optimizer of this process cuts its buckets again when autotuning asks for other sizes.
        steps: the numbers of steps that the optimizers of this rank have made.
        joins: the number of times that all ranks have joined; after each, all count calls and steps from 0 again.
        freed, changes: process set ids to use again, and how often sets were added or removed.
        last_by_members: the highest number of a process set that its members have made alone.
        process: the id of the process that started it.
        abandoned: whether this process is a forked child, in which the generation cannot be used.
        guard: called with the ``Operation`` of each collective that is about to be submitted, and may raise; None in general.
    """

    def __init__(
        self, world: World, config: Config, earlier: int = 0, calls: int = 1, start_limit: timedelta | None = None
    ) -> None:
        self.world = world
        self.identity = world.identity
        self.config = config
        self.generation = earlier + 1
        self.workers: dict[int, WorkerThread] = {}
        self.termination = Termination(self.identity.rank, self.workers, config.timeout.total_seconds())
        self.observer = Observer()
        self.recording = Recording(config, self.identity.rank, self.observer)
        self.process = os.getpid()
        self.secret = b""
        self.objects = ObjectProtection(b"", self.identity.rank)
        self.crowded = False
        self.placement = ANYWHERE
        self.watch: Watch = NoPeers(self.termination)
        self.mpi: MpiRanks | None = None
        self.device_engine = ""
        self.buckets_are_tuned = False
        self.steps = StepCounts()
        self.joins = 0
        self.freed: list[int] = []
        self.changes = 0
        self.last_by_members = 1 << 20
        self._calls = calls
        self._start_seconds = (config.start_timeout if start_limit is None else start_limit).total_seconds()
        self._endpoints: list[Endpoint] = []
        self._watching: Watching | None = None
        self._others: OtherProcesses | None = None
        self.abandoned = False
        self._sockets: list[Connection] = []
        self._crash_is_reported = self._all_hear_of_crash = False
        self.guard: Callable[[int], None] | None = None

    def __repr__(self) -> str:
        state = "runs" if self.stopped is None else f"ended: {self.stopped}"
        return f"Generation({self.generation}, rank {self.identity.rank} of {self.identity.size}, {state})"

    @property
    def mark(self) -> str:
        """Names this generation, and no other one of any job. It is drawn, and not secret."""
        return f"{self._endpoints[0].name}/{self.generation}".strip("\0")

    @property
    def hosts(self) -> list[str]:
        """The name of each rank's host, by rank."""
        return [endpoint.host for endpoint in self._endpoints]

    @property
    def addresses(self) -> Sequence[str]:
        """This rank's endpoint, with the addresses at which other hosts reach it."""
        return self._endpoints[self.identity.rank].addresses

    @property
    def stopped(self) -> HorovodInternalError | None:
        """The error of all further submissions; None while the generation runs."""
        return self.termination.error

    # Start and end

    def start(self, process_sets: Sequence[RequestedSet] = ()) -> StaticSets:
        """Find the other ranks, connect, and start the worker threads. Every rank of the job must call it.

        Raises:
            ValueError: the arguments or settings of the ranks differ.
            TimeoutError, RuntimeError: ranks are missing; the message names them.
        """
        tuning.check(self.config)
        with RankMeeting(self.world, self.config, self.termination, self._calls, self._start_seconds) as meeting:
            job = meeting.meet(self.generation, process_sets)
            self._endpoints = meeting.endpoints
            self._adopt(job)
            sets = agree_on_process_sets(job.process_sets, self.identity.rank)
            groups = dict(enumerate([list(range(self.identity.size)), *sets.ranks]))
            self._connect(meeting.mesh, groups, meeting.deadline)
        membership.rank = self.identity.rank
        membership.ranks = groups
        if self.identity.rank == 0:
            _log.info("%s", job_summary(self.hosts, self.workers[0].communicator, self.device_engine))
        return sets

    def _adopt(self, job: JobInfo) -> None:
        """Adopt what follows from the ranks' exchange."""
        self.config = dataclasses.replace(self.config, cpu_operations=job.host_engine)
        self.generation, self.crowded = job.generation, job.crowded
        self.device_engine, self.mpi = job.device_engine, job.mpi
        self.secret = job.secret
        if len(set(self.hosts)) > 1:
            key = hmac.digest(self.secret, f"objects\0{self.mark}".encode(), hashlib.sha256)
            self.objects = ObjectProtection(key, self.identity.rank)
        if not (self.world.is_launched_job and self.identity.local_ranks_known):
            self.identity = find_local_ranks(self.identity, job.nodes)
        asked, local_rank = self.config.thread_affinity, self.identity.local_rank
        core = asked[local_rank] if local_rank < len(asked) else None
        self.placement = placement_of(job.cpu_resources, self.identity.rank, core)

    def _connect(self, mesh: Mesh | None, groups: Mapping[int, list[int]], deadline: float) -> None:
        """Connect to the ranks that this rank needs, and start the worker threads of its process sets."""
        rank, size = self.identity.rank, self.identity.size
        mine = {group: ranks for group, ranks in groups.items() if rank in ranks}
        sockets: dict[ConnectionKey, Connection] = {}
        if self.recording.of_all_ranks:
            kept = max(self.config.flight_recorder_size, _RECORDED)
            self.config = dataclasses.replace(self.config, flight_recorder_size=kept)
        watching = self._watching = Watching(
            self.config,
            rank,
            self._endpoints,
            self.secret,
            self.generation,
            self.workers,
            self.termination,
            self.recording,
            self.observer,
        )

        def connect(keys: list[ConnectionKey]) -> dict[ConnectionKey, Connection]:
            assert mesh is not None
            return mesh.connect(self._endpoints, keys, str(self.generation), self.secret, deadline)

        if mesh is not None:
            tree = liveness_tree(tree_of(range(size), self._endpoints, self.config))
            keys = liveness_connections(rank, tree)
            for group, ranks in mine.items():
                keys += control_connections(group, ranks, rank, tree_of(ranks, self._endpoints, self.config))
            sockets = connect(keys)
            self._sockets = list(sockets.values())
            watching.connect(tree, sockets)
            self.watch = watching.watch
            self._ask_after_others(sockets)
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
                self.mpi,
                self.listener_settings(),
                self.observer,
                lambda: self.buckets_are_tuned,
            )
        if self.device_engine:
            all_ranks = self.workers[0]
            all_ranks.executor.devices = DeviceEngines(
                self.device_engine, rank, size, all_ranks.communicator, self.config.nccl_start_timeout
            )
        self.recording.begin(self.hosts)
        watching.start()
        for worker in self.workers.values():
            worker.start()

    def _ask_after_others(self, sockets: Mapping[ConnectionKey, Connection]) -> None:
        """If MPI is used, make it check that all ranks' processes run while it waits for them, also after this generation."""
        if self.config.cpu_operations == MpiEngine.name or mpi.initialised_here():
            self._others = OtherProcesses(self.identity.rank, self._endpoints)
            self._others.keep({key.peer: made.socket for key, made in sockets.items() if key.role == LIVENESS})
            mpi.watch_ended_ranks(self._others.gone, self._others.close)

    def listener_settings(self) -> ListenerSettings:
        """The parameters of connections that are made while the job runs."""
        identity, local, interfaces = self.identity, self.world.on_this_host, self.config.network_interfaces

        def open_mesh() -> Mesh:
            mesh = Mesh(identity.rank, identity.hostname, local, interfaces)
            mesh.keep_to(self.addresses)
            return mesh

        seconds = self.config.start_timeout.total_seconds()
        return ListenerSettings(identity.size, open_mesh, f"{self.generation}.late", self.secret, seconds)

    def discard(self) -> None:
        """Release what a failed :meth:`start` has made. No thread runs yet."""
        for worker in self.workers.values():
            worker.close()
        self.recording.stop()
        if self._watching is not None:
            self._watching.close()
        for made in self._sockets:
            made.close()

    def crashed(self, reason: str) -> None:
        """Tell all ranks that an error ends this process, unless they know. Any thread."""
        if self._crash_is_reported:
            return
        self._crash_is_reported = True
        if self.identity.size > 1 and self.stopped is None:
            self._all_hear_of_crash = True
            self.watch.report(self.identity.rank, reason, cause=RAISED)
        else:
            self.termination.ended_by(reason, own=True)

    def stop(self, reason: str = "") -> str:
        """End this generation, in good order or at once if the job has failed, and release everything.

        Args:
            reason: what this rank did, with "it" as the subject, if its ranks form other groups; their steps are not compared.

        Returns:
            How this rank's numbers of steps differ from those of the first rank that has left; "" if they do not, if the job or
            this rank has failed, and in elastic jobs, whose ranks may leave a round at different steps.
        """
        raised = crash.unhandled()
        if raised:
            self.crashed(raised)
        if self._all_hear_of_crash:
            self.termination.failed.wait(5.0)
        error = crash.failed_collective()
        if isinstance(error, RankLostError):
            self.termination.blame_leaver()
        elif error is not None:
            self.termination.ended_by(f"{type(error).__name__}: {error}", own=False)
        deadline = time.monotonic() + self.config.timeout.total_seconds()
        compared = self.config.check != "off" and not reason
        left = reason or "it left the job (hvd.shutdown() or the end of its script)"
        made, steps = (self.steps.describe(), self.steps.sent()) if compared else ("", [])
        for group, worker in self.workers.items():
            worker.leave(f"{left}{made}", () if group else steps)
        for worker in self.workers.values():
            self._await_end(worker, deadline)
        first = self.workers[0].farewell if 0 in self.workers else None
        for companion in self.termination.companions:
            companion.close()
        if self._watching is not None:
            if self.termination.failure is None:
                self._watching.finish_timeline()
            self._watching.close()
        self.recording.stop()
        for worker in self.workers.values():
            worker.close()
        self.workers.clear()
        if (
            first is None
            or not compared
            or raised
            or error
            or self.termination.failure
            or elastic_process.this_process()
        ):
            return ""
        return self.steps.difference(self.identity.rank, first)

    def end_worker(self, group: int, reason: str) -> None:
        """End the worker thread of one process set. All its members must call it.

        Raises:
            HorovodInternalError: the job has failed meanwhile.
        """
        worker = self.workers[group]
        worker.leave(reason)
        self._await_end(worker, time.monotonic() + self.config.timeout.total_seconds())
        del self.workers[group]  # not before: while it waits for a rank that is lost, a failure must find it
        worker.close()
        if self.termination.failure is not None and not worker.finished:
            raise self.termination.failure.again()

    def _await_end(self, worker: WorkerThread, deadline: float) -> None:
        if not worker.join(max(0.1, deadline - time.monotonic())):
            _log.warning(
                "rank %d: the worker thread of process set %s did not end within %g seconds; it is aborted",
                self.identity.rank,
                worker.ranks,
                self.config.timeout.total_seconds(),
            )
            worker.abort(HorovodInternalError(SHUT_DOWN))
            worker.join(1.0)

    # Use

    def is_homogeneous(self) -> bool:
        """Whether every host runs the same number of ranks."""
        return len(set(Counter(self.hosts).values())) <= 1

    def all_joined(self) -> None:
        """Start counting unnamed calls from 0 again: until now the ranks may have made different numbers of them.

        Called on every rank, by the thread that has joined.
        """
        self.joins += 1
        self.steps.count_anew()
        self.workers[0].count_anew()

    def _refuse(self, operation: int) -> None:
        raise HorovodInternalError(
            f"this process was forked from rank {self.identity.rank} and cannot communicate for it; "
            "call collectives in the process that called hvd.init()"
        )

    def abandon(self) -> None:
        """In a forked child, close the inherited descriptors: they would keep the parent's connections open."""
        if self.abandoned:
            return  # in a child of a forked child these numbers may be files of its own
        self.abandoned, self.guard = True, self._refuse
        descriptors = [descriptor for worker in self.workers.values() for descriptor in worker.descriptors()]
        descriptors += [each for companion in self.termination.companions for each in companion.descriptors()]
        descriptors += self._others.descriptors() if self._others is not None else []
        if self._watching is not None:
            descriptors += self._watching.descriptors()
            self._watching.abandon()
        for descriptor in descriptors:
            try:
                os.close(descriptor)
            except OSError:
                pass  # closed in the parent at the moment of the fork
