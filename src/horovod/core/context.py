"""One generation of the runtime, from ``init()`` to ``shutdown()``: who am I, my lanes, my sentinel.

The process has at most one :class:`Context` at a time. Bindings submit through ``core.collectives``; they and users reach
the context through the functions at the end of this module.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence

import msgspec

from horovod.control.channel import Channel
from horovod.control.liveness import Sentinel
from horovod.control.meeting import MeetingPlace, exchange, place_on_this_host
from horovod.control.rendezvous import RendezvousClient, RendezvousError
from horovod.control.secret import decode_secret, make_secret
from horovod.control.wiring import Card, Switchboard, Wire
from horovod.core.assembly import assemble, control_wires
from horovod.core.config import (
    AUTOTUNE,
    DYNAMIC,
    LOG_HIDE_TIME,
    LOG_LEVEL,
    RENDEZVOUS_ADDRESS,
    RENDEZVOUS_PORT,
    SECRET_KEY,
    THREADS,
    TIMELINE,
    Config,
)
from horovod.core.coordinator import CoordinatorLane
from horovod.core.errors import NOT_INITIALIZED, SHUT_DOWN, HorovodInternalError
from horovod.core.lane import Lane, Watch
from horovod.core.messages import Operation
from horovod.core.process_set import ProcessSet, global_process_set, membership
from horovod.environments import Identity
from horovod.environments import identity as find_identity
from horovod.observe import logging as observe_logging
from horovod.observe import whereabouts
from horovod.observe.timeline import Timeline

_log = logging.getLogger("horovod.core")

LIVENESS = "liveness"
FAILURE_KEY = "failure"
"""Where the launcher's store learns which rank failed first."""


class Introduction(msgspec.Struct, array_like=True):
    """What a rank brings to the meeting in ``init()``."""

    card: Card
    process_sets: tuple[tuple[int, ...], ...]
    cores: int
    threads: int


class _NobodyElse:
    """The watch of a job of one: there is nobody to lose."""

    def __init__(self, context: Context) -> None:
        self.whereabouts: dict[int, str] = {}
        self._context = context

    def report(self, rank: int, reason: str, suspected: bool = False) -> None:
        self._context.fail(rank, reason)

    def probe(self) -> None:
        pass


class Context:
    """A running generation.

    Attributes:
        identity: this rank's place in the job.
        config: the settings in force.
        lanes: by process set id, the lanes of the sets this rank is a member of.
        stopped: why nothing can be submitted any more, or None.
        secret: of the job, for connections that are made later.
        watch: what lanes report failures to.
        crowded: on some host the ranks compute with as many threads as there are cores, so that none is free for
            communication; the same on all ranks.
        freed, changes: process set ids to be used again, and how often sets were added or removed.
    """

    def __init__(self, identity: Identity, config: Config, generation: int) -> None:
        self.identity = identity
        self.config = config
        self.generation = generation
        self.lanes: dict[int, Lane] = {}
        self.stopped: HorovodInternalError | None = None
        self.process = os.getpid()
        self._cards: list[Card] = []
        self._sentinel: Sentinel | None = None
        self._place: MeetingPlace | None = None
        self.secret = b""
        self.crowded = False
        self.watch: Watch = _NobodyElse(self)
        self.freed: list[int] = []
        self.changes = 0
        self._abandoned = False
        self._timeline: Timeline | None = None
        self._sockets: list[socket.socket] = []
        self._failed = threading.Event()
        self._next_name: dict[tuple[int | None, str], int] = {}

    # Life

    def start(self, process_sets: Sequence[Sequence[int]]) -> None:
        """Meet the other ranks, connect, and start the lanes.

        Args:
            process_sets: ranks of the static sets, ids 1, 2, ... in this order; the same on every rank.
        """
        identity, config = self.identity, self.config
        deadline = time.monotonic() + config.start_timeout.total_seconds()
        groups = {0: list(range(identity.size))} | {number: list(ranks) for number, ranks in enumerate(process_sets, 1)}
        mine = {group: ranks for group, ranks in groups.items() if identity.rank in ranks}
        if identity.size == 1:
            self._start_lanes(mine, {}, None, b"", deadline)
        else:
            local_only = identity.local_size == identity.size
            self._place = meeting_place(identity)
            switchboard = Switchboard(identity.rank, identity.hostname, local_only, config.network_interface)
            try:
                secret = self.secret = self._meet(switchboard, process_sets)
                wires = [wire for group, ranks in mine.items() for wire in control_wires(group, ranks, identity.rank)]
                peers = range(1, identity.size) if identity.rank == 0 else [0]
                wires += [Wire(peer, LIVENESS, 0) for peer in peers]
                sockets = switchboard.connect(self._cards, wires, str(self.generation), secret, deadline)
                self._sockets = list(sockets.values())
                links = {wire.peer: Channel(made) for wire, made in sockets.items() if wire.role == LIVENESS}
                self._sentinel = Sentinel(
                    identity.rank, links, config.timeout.total_seconds() / 3, whereabouts.main_thread, self.fail
                )
                self._start_lanes(mine, sockets, switchboard, secret, deadline)
            finally:
                switchboard.close()
        membership.rank = identity.rank
        membership.ranks = groups
        if config.autotune and identity.rank == 0:
            _log.warning("%s is set, but this version has no autotuning; it is ignored", AUTOTUNE)

    def _meet(self, switchboard: Switchboard, process_sets: Sequence[Sequence[int]]) -> bytes:
        """Exchange cards; returns the job's secret."""
        assert self._place is not None
        identity, seconds = self.identity, self.config.start_timeout.total_seconds()
        card = switchboard.card
        if self._place.hosted and identity.rank == 0:
            card = msgspec.structs.replace(card, secret=make_secret())
        own = Introduction(card, tuple(tuple(ranks) for ranks in process_sets), *_cores_and_threads())
        bodies = exchange(
            self._place, self.generation, identity.rank, identity.size, msgspec.msgpack.encode(own), seconds
        )
        introductions = [msgspec.msgpack.decode(body, type=Introduction) for body in bodies]
        for introduction in introductions:
            if introduction.process_sets != own.process_sets:
                raise ValueError(
                    "Horovod initialization failed: the ranks were given different process sets. "
                    f"Rank {identity.rank} has {own.process_sets}, rank {introduction.card.rank} has "
                    f"{introduction.process_sets}. Every rank must pass the same list in the same order."
                )
        self._cards = [introduction.card for introduction in introductions]
        self.crowded = _crowded(introductions)
        return self._cards[0].secret or self._place.secret

    def _start_lanes(
        self,
        groups: dict[int, list[int]],
        sockets: Mapping[Wire, socket.socket],
        switchboard: Switchboard | None,
        secret: bytes,
        deadline: float,
    ) -> None:
        def connect(wires: list[Wire]) -> dict[Wire, socket.socket]:
            assert switchboard is not None
            return switchboard.connect(self._cards, wires, str(self.generation), secret, deadline)

        watch = self.watch = self._sentinel or _NobodyElse(self)
        for group, ranks in groups.items():
            self.lanes[group] = assemble(
                group,
                ranks,
                self.identity.rank,
                self.identity.local_rank,
                self._cards,
                sockets,
                connect,
                self.config,
                watch,
                self._stopped,
                deadline,
            )
        if self.config.timeline and self.config.timeline != DYNAMIC:
            self.start_timeline(self.config.timeline, self.config.timeline_mark_cycles)
        if self._sentinel is not None:
            self._sentinel.start()
        for lane in self.lanes.values():
            lane.start()

    def discard(self) -> None:
        """Give back what a failed :meth:`start` has taken. No thread runs yet."""
        for lane in self.lanes.values():
            lane.close()
        self.stop_timeline()
        if self._sentinel is not None:
            self._sentinel.leave()
        for made in self._sockets:
            made.close()

    def stop(self) -> None:
        """End this generation: leave in good order, or at once if the job has failed. Gives everything back."""
        seconds = self.config.timeout.total_seconds()
        crash = _unhandled_exception()
        if crash and self._sentinel is not None and self.stopped is None:
            self._sentinel.report(self.identity.rank, crash)
            self._failed.wait(5.0)
        reason = "it left the job (hvd.shutdown() or the end of its script)"
        deadline = time.monotonic() + seconds
        for lane in self.lanes.values():
            lane.leave(reason)
        for lane in self.lanes.values():
            if not lane.join(max(0.1, deadline - time.monotonic())):
                _log.warning(
                    "rank %d: the job did not end in good order within %g seconds", self.identity.rank, seconds
                )
                lane.abort(HorovodInternalError(SHUT_DOWN))
                lane.join(5.0)
        if self._sentinel is not None:
            self._sentinel.leave()
        self.stop_timeline()
        for lane in self.lanes.values():
            lane.close()
        self.lanes.clear()

    def end_lane(self, lane: Lane, reason: str) -> None:
        """End one process set's lane; all its members do."""
        lane.leave(reason)
        self._await_end(lane, time.monotonic() + self.config.timeout.total_seconds())
        lane.close()

    def _await_end(self, lane: Lane, deadline: float) -> None:
        if not lane.join(max(0.1, deadline - time.monotonic())):
            _log.warning("rank %d: process set %s did not end in good order in time", self.identity.rank, lane.ranks)
            lane.abort(HorovodInternalError(SHUT_DOWN))
            lane.join(5.0)

    def start_timeline(self, path: str, mark_cycles: bool) -> None:
        """Write a timeline to ``path`` from now on, if this is rank 0; a file that cannot be written is logged.

        Raises:
            ValueError: HOROVOD_TIMELINE was not set when Horovod was initialised.
        """
        if not self.config.timeline:
            raise ValueError(f"Set {TIMELINE}={DYNAMIC} to enable dynamic timeline usage.")
        if self.identity.rank != 0 or (self._timeline is not None and self._timeline.path == path):
            return
        try:
            timeline = Timeline(path, mark_cycles)
        except OSError as error:
            _log.error("the timeline %s cannot be written: %s", path, error)
            return
        self.stop_timeline()
        self._timeline = timeline
        for lane in self.lanes.values():
            if isinstance(lane, CoordinatorLane):
                lane.timeline = timeline

    def stop_timeline(self) -> None:
        """End the timeline and complete its file, if one is being written."""
        timeline, self._timeline = self._timeline, None
        if timeline is not None:
            for lane in self.lanes.values():
                if isinstance(lane, CoordinatorLane):
                    lane.timeline = None
            timeline.close()

    def fail(self, rank: int, reason: str) -> None:
        """The verdict: ``rank`` failed first. Fails everything pending, on the sentinel's thread."""
        if self.identity.rank in (0, rank) or rank == 0:
            self._tell_launcher(rank, reason)  # first: the abort may end this process, which should not be blamed
        self.stopped = HorovodInternalError(self._failure_text(rank, reason))
        for lane in list(self.lanes.values()):  # another thread may be adding a process set
            lane.abort(self.stopped)
        self._failed.set()

    def _failure_text(self, rank: int, reason: str) -> str:
        who = f"rank {rank}"
        if rank < len(self._cards):
            who += f" (host {self._cards[rank].host}, process {self._cards[rank].pid})"
        reason = reason.rstrip(".")
        return f"Horovod: {who} failed: {reason}. Every collective of this job has ended with this error, on all ranks."

    def _tell_launcher(self, rank: int, reason: str) -> None:
        if self._place is None or self._place.hosted:
            return
        try:
            with RendezvousClient(self._place.address, self._place.secret, 2.0) as client:
                accusation = json.dumps({"rank": rank, "reason": reason}).encode()
                client.put(FAILURE_KEY, accusation, only_first=True, timeout=2.0)  # the abort waits for this
        except (RendezvousError, OSError) as error:
            _log.debug("the launcher could not be told which rank failed first: %s", error)

    def _stopped(self, rank: int, reason: str, interrupted: bool) -> None:
        if interrupted and rank != self.identity.rank:
            self._tell_launcher(rank, reason)
        if self.stopped is None:
            self.stopped = HorovodInternalError(f"{SHUT_DOWN} This was caused by rank {rank}: {reason}.")

    # Use

    def lane(self, process_set_id: int | None, operation: int) -> Lane:
        """The lane of a process set, for submitting an ``Operation``.

        Raises:
            ValueError: the set is not registered, or this rank is not a member.
            HorovodInternalError: this process is a forked child.
        """
        if self._abandoned:
            raise HorovodInternalError(
                f"this process was forked from rank {self.identity.rank} and cannot communicate for it; "
                "call collectives in the process that called hvd.init()"
            )
        lane = self.lanes.get(-1 if process_set_id is None else process_set_id)
        if lane is None:
            what = Operation(operation).name.capitalize()
            if process_set_id not in membership.ranks:
                raise ValueError(f"{what}: Process set provided does not exist, or has not been registered.")
            raise ValueError(f"{what}: Rank {self.identity.rank} is not a member of the provided process set.")
        return lane

    def is_homogeneous(self) -> bool:
        """Whether every host runs the same number of ranks."""
        counts: dict[str, int] = {}
        for card in self._cards:
            counts[card.host] = counts.get(card.host, 0) + 1
        return len(set(counts.values())) <= 1

    def auto_name(self, prefix: str, process_set_id: int | None) -> str:
        """A name for a request that has none: the n-th such call of all members of the set belongs together."""
        key = (process_set_id, prefix)
        number = self._next_name.get(key, 0) + 1
        self._next_name[key] = number
        return f"{prefix}.noname.{number}"

    def everybody_joined(self) -> None:
        """Called by the thread that joined, on every rank: as the ranks may have made different numbers of unnamed calls until
        now, their counting starts anew."""
        self._next_name = {key: number for key, number in self._next_name.items() if key[0] != 0}

    def abandon(self) -> None:
        """In a forked child: close what was inherited, so that this process neither uses nor holds the parent's connections."""
        if self._abandoned:
            return  # a child of a forked child: by now the numbers may stand for files of its own
        self._abandoned = True
        descriptors = [descriptor for lane in self.lanes.values() for descriptor in lane.descriptors()]
        if self._sentinel is not None:
            descriptors += self._sentinel.descriptors()
        for descriptor in descriptors:
            try:
                os.close(descriptor)
            except OSError:
                pass  # closed in the parent at the moment of the fork


def _cores_and_threads() -> tuple[int, int]:
    """The cores this process may use, and the threads it will compute with."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get(THREADS, "").split(",")[0]
    return cores, int(threads) if threads.isdecimal() and int(threads) else cores


def _crowded(introductions: Sequence[Introduction]) -> bool:
    threads: dict[str, int] = {}
    cores: dict[str, int] = {}
    for each in introductions:
        host = each.card.host
        threads[host] = threads.get(host, 0) + each.threads
        cores[host] = max(cores.get(host, 0), each.cores)
    return any(threads[host] >= cores[host] for host in threads)


def meeting_place(identity: Identity, env: dict[str, str] | None = None) -> MeetingPlace:
    """Where the ranks of this job meet.

    Raises:
        ValueError: the launcher said neither a place nor enough to find one.
    """
    variables = os.environ if env is None else env
    address, port = variables.get(RENDEZVOUS_ADDRESS), variables.get(RENDEZVOUS_PORT)
    if address and port:
        if SECRET_KEY not in variables:
            raise ValueError(f"{RENDEZVOUS_ADDRESS} is set but {SECRET_KEY} is not; ranks cannot prove who they are")
        if not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"environment variable {RENDEZVOUS_PORT}={port!r}: expected the number of a port")
        return MeetingPlace((address, int(port)), decode_secret(variables[SECRET_KEY]), hosted=False)
    if identity.local_size == identity.size and identity.job:
        return place_on_this_host(identity.job)
    raise ValueError(
        f"Horovod initialization failed: {identity.launcher} started {identity.size} ranks on several hosts and gave them "
        f"no place to meet. Set {RENDEZVOUS_ADDRESS}, {RENDEZVOUS_PORT} and {SECRET_KEY}, or start the job with horovodrun."
    )


def _unhandled_exception() -> str:
    """What ends this process, if it is an exception that nobody caught."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if not isinstance(error, BaseException) or isinstance(error, HorovodInternalError):
        return ""
    if error is _seen_before_init:
        return ""
    line = whereabouts.raised_at(error)
    return f"it raised {type(error).__name__}: {error}" + (f" (at {line})" if line else "")


_seen_before_init: BaseException | None = None
_context: Context | None = None
_generation = 0
_life = threading.Lock()
_hooked = False


def init(process_sets: Sequence[ProcessSet] | None = None) -> None:
    """Start the runtime; every rank must call it. A second call while it runs only looks the process sets up again.

    Raises:
        ValueError: the environment or the process sets are wrong; the text begins "Horovod initialization failed" where
            ranks contradict each other.
        TimeoutError, RuntimeError: the ranks did not find each other; the message says who is missing.
    """
    global _context, _generation, _hooked, _seen_before_init
    with _life:
        sets = list(process_sets or [])
        if _context is not None and _context.process == os.getpid():
            _look_up(sets)
            return
        identity = find_identity()
        config = Config.from_env()
        observe_logging.configure(identity.rank, LOG_LEVEL, LOG_HIDE_TIME)
        ranks, duplicate = _check(sets, identity.size)
        _seen_before_init = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        _generation += 1
        context = Context(identity, config, _generation)
        try:
            context.start(ranks)
        except BaseException:
            context.discard()
            raise
        _context = context
        global_process_set.ranks = list(range(identity.size))
        if duplicate is None:
            for number, process_set in enumerate(sets, 1):
                process_set.process_set_id = number
        if not _hooked:
            _hooked = True
            atexit.register(shutdown)
            os.register_at_fork(after_in_child=_after_fork)
        if duplicate is not None:
            raise ValueError(
                f"Horovod could not be initialized because process_sets entry number {duplicate} is a duplicate: "
                f"{sets[duplicate]} has the same ranks as another set."
            )


def _check(sets: Sequence[ProcessSet], size: int) -> tuple[list[list[int]], int | None]:
    """The sets' ranks, and the index of an entry that stands twice (or is the global set); no sets at all then."""
    found: list[list[int]] = []
    duplicate = None
    for number, process_set in enumerate(sets):
        ranks = process_set.ranks or []
        wrong = [rank for rank in ranks if not 0 <= rank < size]
        if wrong or len(set(ranks)) != len(ranks) or not ranks:
            what = (
                f"rank {wrong[0]} is not one of the job's {size}" if wrong else "a rank stands twice, or there is none"
            )
            raise ValueError(f"Horovod initialization failed: process set {ranks}: {what}.")
        if ranks in found or ranks == list(range(size)):
            process_set.process_set_id = None
            duplicate = number if duplicate is None else duplicate
        found.append(ranks)
    return ([], duplicate) if duplicate is not None else (found, None)


def _look_up(sets: Sequence[ProcessSet]) -> None:
    known = {tuple(ranks): number for number, ranks in membership.ranks.items()}
    for process_set in sets:
        process_set.process_set_id = known[tuple(process_set.ranks or [])]


def shutdown() -> None:
    """End the runtime on this rank, and with it the job's collectives on all ranks. Harmless when it does not run."""
    global _context
    with _life:
        context, _context = _context, None
        if context is None or context.process != os.getpid():
            return
        try:
            context.stop()
        finally:
            membership.clear()
            global_process_set.ranks = []


def is_initialized() -> bool:
    """Whether ``init()`` has been called and ``shutdown()`` has not. Never raises."""
    return _context is not None


def current() -> Context:
    """The running generation.

    Raises:
        ValueError: there is none.
    """
    if _context is None:
        raise ValueError(NOT_INITIALIZED)
    return _context


def running() -> Context:
    """The running generation, for a collective.

    Raises:
        HorovodInternalError: there is none; recoverable by ``init()``, as elastic training does.
    """
    if _context is None:
        raise HorovodInternalError(NOT_INITIALIZED)
    return _context


def _after_fork() -> None:
    global _life
    _life = threading.Lock()
    if _context is not None:
        _context.abandon()
