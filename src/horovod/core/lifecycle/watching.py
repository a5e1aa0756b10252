"""Watches one generation: the liveness monitor finds lost ranks, the dumper writes down what this rank did when something is
wrong, and progress reports travel between the monitors; the dumper's thread makes them.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence

import msgspec

from horovod._base.config import METRICS, Config
from horovod.control.channel import Channel
from horovod.control.connection import Connection
from horovod.control.failure import Cause, FailureKind
from horovod.control.liveness_monitor import LivenessMonitor
from horovod.control.liveness_tree import LivenessTree
from horovod.control.mesh import ConnectionKey, Endpoint
from horovod.control.processes import why_not_running
from horovod.control.rendezvous.rendezvous_kinds import LauncherServer
from horovod.core.lifecycle import elastic_process
from horovod.core.lifecycle.dumping import Dumper, Members, neighbours_of
from horovod.core.lifecycle.live_server import LiveServer, MetricsAddressError
from horovod.core.lifecycle.progress_reports import ProgressReports
from horovod.core.lifecycle.recording import Recording
from horovod.core.lifecycle.standing import StandingReporter
from horovod.core.lifecycle.termination import NoPeers, Termination
from horovod.core.negotiation.tree import COORDINATOR, Tree
from horovod.core.worker.observer import Observer
from horovod.core.worker.role import Watch
from horovod.core.worker.worker import WorkerThread
from horovod.observe import threads
from horovod.observe.deadlock import DeadlockDetector, decode, encode

_log = logging.getLogger("horovod.core")

LIVENESS = "liveness"

_LAST_PARTS_SECONDS = 5.0
"""How long rank 0, and a relay, wait for the last parts of the timeline of the ranks below."""


def liveness_tree(tree: Tree) -> LivenessTree:
    """The tree of liveness connections. It has relays if the agreement has relays.

    Args:
        tree: the tree of the process set of all ranks.
    """
    return LivenessTree(len(tree), [tree.group(child) for child in tree.children(COORDINATOR)])


def liveness_connections(rank: int, tree: LivenessTree) -> list[ConnectionKey]:
    """The connections that a rank's monitor needs."""
    return [ConnectionKey(peer, LIVENESS, 0) for peer in tree.peers(rank)]


def _lost() -> list[str]:
    """The ranks that the job has gone on without."""
    process = elastic_process.this_process()
    return [] if process is None else process.lost


class Watching:
    """The monitor and the dumper of one rank. A job of one rank has no monitor, and one that records nothing no dumper.

    Args:
        rank: this one; ``endpoints`` are those of all ranks.
        secret: the secret of the job.
        generation: the number of the generation.
        workers: by process set id; it may still be empty.
        recording: the timeline.
        observer: observes the workers.

    Attributes:
        watch: takes reports of failures.
    """

    def __init__(
        self,
        config: Config,
        rank: int,
        endpoints: Sequence[Endpoint],
        secret: bytes,
        generation: int,
        workers: Mapping[int, WorkerThread],
        termination: Termination,
        recording: Recording,
        observer: Observer,
    ) -> None:
        self.watch: Watch = NoPeers(termination)
        self._config = config
        self._rank = rank
        self._endpoints = endpoints
        self._workers = workers
        self._termination = termination
        self._monitor: LivenessMonitor | None = None
        self._speaks_for_others = False
        self._recording = recording
        self._observer = observer
        self._generation = generation
        self._live: LiveServer | None = None
        self._dumper: Dumper | None = None
        self._progress: ProgressReports | None = None
        self._reporter: StandingReporter | None = None
        self._deadlocks: DeadlockDetector | None = None
        seconds = config.deadlock_time.total_seconds()
        if seconds and len(endpoints) > 1:
            self._reporter = StandingReporter(
                len(endpoints), workers, lambda: [companion.messages() for companion in list(termination.companions)]
            )
            self._deadlocks = DeadlockDetector(len(endpoints), seconds) if rank == 0 else None
        if config.flight_recorder_size:
            self._dumper = self._make_dumper(secret, generation)
            termination.write_down = self._dumper.failed

    def _make_dumper(self, secret: bytes, generation: int) -> Dumper:
        endpoints, rank = self._endpoints, self._rank
        folder = f"{endpoints[0].host}-{endpoints[0].pid}"
        members = Members(
            hashlib.sha256(secret or folder.encode()).hexdigest()[:12],
            folder,
            generation,
            rank,
            [endpoint.host for endpoint in endpoints],
            neighbours_of(rank, [(endpoint.process_namespace, endpoint.pid) for endpoint in endpoints]),
            isinstance(self._termination.point, LauncherServer),
            _lost(),
        )
        return Dumper(
            self._config,
            members,
            self._workers,
            self._look,
            lambda why, reason: self.watch.request_dump(why, reason),
            lambda: {} if self._monitor is None else self._monitor.no_progress,
        )

    def connect(self, tree: LivenessTree, sockets: Mapping[ConnectionKey, Connection]) -> None:
        """Make the monitor.

        Args:
            tree: the tree of the liveness connections.
            sockets: the sockets by connection, including those of :func:`liveness_connections`.
        """
        self._speaks_for_others = bool(tree.ways(self._rank))
        timeout = self._config.timeout.total_seconds()  # a waiting rank probes its peers after a third of it
        self.watch = self._monitor = LivenessMonitor(
            self._rank,
            tree,
            {
                key.peer: Channel(made, reach_seconds=timeout * 2 / 3)
                for key, made in sockets.items()
                if key.role == LIVENESS
            },
            timeout / 3,
            self._config.stall_limit.total_seconds(),
            threads.main_thread,
            self._look,
            self._termination.describe,
            self._termination.fail,
            threads.lines,
            lambda: [name for worker in list(self._workers.values()) for name in worker.awaited()],
            self._dumper.request if self._dumper is not None else lambda why, reason: None,
            self._progress_came,
            self._standing,
            self._standing_came,
        )

    def _make_live_server(self, progress: ProgressReports) -> LiveServer:
        def snapshot() -> bytes:
            self.watch.probe()  # for the next view
            return msgspec.json.encode(progress.snapshot(dict(self.watch.call_sites), dict(self.watch.awaited)))

        try:
            return LiveServer(snapshot, progress.metrics, self._config.metrics)
        except MetricsAddressError as error:
            _log.error("%s. Correct %s.", error, METRICS)
            return LiveServer(snapshot, progress.metrics, "")

    def _progress_came(self, rank: int, body: bytes) -> None:
        """On rank 0, on the monitor's thread."""
        dumper, progress, now = self._dumper, self._progress, time.monotonic()
        if dumper is not None and progress is not None:
            dumper.post(lambda: progress.take(rank, body, now))

    def _standing(self) -> bytes:
        """On the monitor's thread: what this rank waits for."""
        if self._reporter is None:
            return b""
        try:
            return encode(self._reporter.standing())
        except Exception:  # a bug here must not end a job
            self._reporter = None
            _log.exception("rank %d cannot report what it waits for, so deadlocks are not detected", self._rank)
            return b""

    def _standing_came(self, rank: int, body: bytes, asked: float) -> float | None:
        """On rank 0, on the monitor's thread."""
        detector, now = self._deadlocks, time.monotonic()
        if detector is None:
            return None
        detector.take(rank, decode(body) if body else None, asked, now)
        found = detector.found()
        if found is None:
            return detector.next_look(now)
        if not found.certain:
            _log.warning("%s", found.text)
            return detector.next_look(now)
        call_sites = {each: line for each, line in self.watch.call_sites.items() if each == found.blamed}
        self.watch.report(found.blamed, found.text, cause=Cause(FailureKind.TIME_LIMIT, found.name, call_sites))
        return None

    def _send_progress(self, body: bytes) -> None:
        if self._monitor is not None:
            self._monitor.report_progress(body)

    def finish_timeline(self) -> None:
        """Before :meth:`close`: write the rest of a timeline of all ranks, within some seconds."""
        if self._progress is None or not self._recording.of_all_ranks:
            return
        self._progress.finish()
        if self._monitor is not None and self._speaks_for_others:
            self._monitor.everyone_left.wait(_LAST_PARTS_SECONDS)

    def _look(self, rank: int) -> str | None:
        """Why a rank cannot answer, or "" if its process runs; None if this process cannot see it."""
        own, other = self._endpoints[self._rank].process_namespace, self._endpoints[rank]
        return why_not_running(other.pid) if own and own == other.process_namespace else None

    def start(self) -> None:
        """Start the threads. The workers must exist."""
        if self._dumper is not None:
            self._progress = ProgressReports(
                self._rank,
                [endpoint.host for endpoint in self._endpoints],
                self._workers,
                self._config.straggler_percent / 100,
                self._generation - 1,
                _lost(),
                self._recording,
                self._observer.reports,
                self._dumper.post,
                self._send_progress,
            )
            if self._rank == 0 and (len(self._endpoints) > 1 or self._config.metrics):
                self._live = self._make_live_server(self._progress)
                self._live.start()
            self._dumper.start()
        if self._monitor is not None:
            self._monitor.start()

    def close(self) -> None:
        """End the threads, even if they have not started, and release everything."""
        if self._live is not None:
            self._live.close()
        if self._monitor is not None:
            self._monitor.leave()
        if self._dumper is not None:
            self._dumper.close()

    def descriptors(self) -> list[int]:
        """The descriptors that a forked child must close."""
        own = [part.descriptors() for part in (self._monitor, self._dumper, self._live) if part is not None]
        return [descriptor for each in own for descriptor in each]

    def abandon(self) -> None:
        """In a forked child: leave the parent's file alone."""
        if self._dumper is not None:
            self._dumper.abandon()
