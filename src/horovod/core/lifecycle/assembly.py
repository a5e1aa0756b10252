"""Puts one process set together: its control connections, its engine, its worker thread. Runs in ``init()``, on every member.

The engine for its host memory is built over the control connections (:mod:`horovod.core.engines.engine_building`),
before the worker thread takes these over.
"""

from __future__ import annotations

import dataclasses
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from horovod._base.config import CPU_OPERATIONS, GPU_OPERATIONS, Config
from horovod.autotune.tuner import Tuner
from horovod.comm.base import Communicator, Stall
from horovod.comm.engine import Bootstrap, EngineError, EngineGroup, EngineSettings, Gather, MpiRanks
from horovod.comm.late import LateCommunicator
from horovod.comm.select import ENGINES, engine
from horovod.comm.shm.communicator import ShmCommunicator
from horovod.comm.spans import HOST
from horovod.comm.switching import SwitchingCommunicator
from horovod.control.channel import Channel
from horovod.control.connection import Connection
from horovod.control.failure_detector import NO_PROGRESS_REPORTS
from horovod.control.mesh import ConnectionKey, Endpoint, data_connections
from horovod.core.engines.engine_building import build_engine, build_proposals
from horovod.core.engines.member_exchange import ExchangeOverConnections
from horovod.core.lifecycle.late_connections import LateConnections, ListenerSettings, by_index
from horovod.core.lifecycle.tuning import make_tuner
from horovod.core.negotiation.tree import COORDINATOR, Tree
from horovod.core.worker.cpu_affinity import CpuPlacement
from horovod.core.worker.observer import Observer
from horovod.core.worker.role import Watch
from horovod.core.worker.worker import WorkerThread

_log = logging.getLogger("horovod.core")

CONTROL = "control"
DATA = "data"

HIERARCHICAL = "hierarchical"

GLOBAL = 0
"""The process set of all ranks, whose settings are tuned."""


Connect = Callable[[list[ConnectionKey]], dict[ConnectionKey, Connection]]
"""Connects to the given peers, all of whom do the same."""


def tree_of(ranks: Sequence[int], endpoints: Sequence[Endpoint], config: Config) -> Tree:
    """Which member sends to which in a process set.

    Args:
        endpoints: of all ranks of the job, by rank.
    """
    return Tree([endpoints[rank].host for rank in ranks], config.relay_threshold)


def control_connections(group: int, ranks: Sequence[int], rank: int, tree: Tree) -> list[ConnectionKey]:
    """The control connections of one member."""
    index = list(ranks).index(rank)
    peers = tree.children(index) if index == COORDINATOR else [tree.parent(index), *tree.children(index)]
    return [ConnectionKey(ranks[peer], CONTROL, group) for peer in peers]


def assemble(
    group: int,
    ranks: Sequence[int],
    rank: int,
    placement: CpuPlacement,
    endpoints: Sequence[Endpoint],
    sockets: Mapping[ConnectionKey, Connection],
    connect: Connect,
    config: Config,
    watch: Watch,
    on_stopped: Callable[[int, str, bool], None],
    deadline: float,
    mpi: MpiRanks | None = None,
    listener_settings: ListenerSettings | None = None,
    observer: Observer | None = None,
    recuts: Callable[[], bool] = lambda: False,
) -> WorkerThread:
    """Build the worker thread of process set ``group`` on this rank, ready to start. Every member must call it.

    Args:
        ranks: the members' global ranks in set order; ``rank`` is this process's.
        placement: where the worker thread runs, and whether it may look for a peer before it sleeps.
        sockets: made from :func:`control_connections`.
        connect: makes further connections among the members, if the engine needs them.
        deadline: ``time.monotonic`` by which all members must have answered.
        mpi: by global rank, the rank's number in MPI.
        listener_settings: the settings for connections that the engine makes at its first use; None: it makes all now.
        observer: what observes the workers of this rank.
        recuts: for autotuning, see :class:`~horovod.autotune.tuner.Tuner`.

    Raises:
        EngineError: no engine can serve this group, or the one that was forced cannot.
        OSError: a member did not answer.
    """
    tree, index = tree_of(ranks, endpoints, config), list(ranks).index(rank)
    keys = control_connections(group, ranks, rank, tree)
    connections = {list(ranks).index(key.peer): sockets[key] for key in keys}
    builder = EngineBuilder(group, rank, placement, endpoints, connect, config, watch, deadline, mpi, listener_settings)
    communicator = builder.build(ranks, connections, DATA, tree=tree)
    tuner: Tuner | None = None
    if config.autotune and group == GLOBAL:
        communicator = builder.with_alternatives(communicator, ranks, connections, tree)
        if index == COORDINATOR and len(ranks) > 1:
            tuner = make_tuner(config, communicator, [endpoint.host for endpoint in endpoints], recuts)
    try:
        proposals = build_proposals(
            EngineGroup(index, len(ranks), tuple(endpoints[member].host for member in ranks)),
            communicator.name == ShmCommunicator.name,  # a forced engine moves the smallest tensor, too
            ExchangeOverConnections(ranks, connections, index, deadline, tree),
            deadline,
        )
    except BaseException:
        communicator.abort()
        communicator.close()
        raise
    channels = {member: Channel(connection) for member, connection in connections.items()}
    return WorkerThread(
        str(group),
        ranks,
        index,
        channels,
        communicator,
        config,
        watch,
        on_stopped,
        placement,
        proposals,
        tree,
        observer,
        tuner,
    )


class EngineBuilder:
    """Builds engines for members of one process set: for all of them, and for the subgroups of a composed engine.

    Args: as of :func:`assemble`.
    """

    def __init__(
        self,
        group: int,
        rank: int,
        placement: CpuPlacement,
        endpoints: Sequence[Endpoint],
        connect: Connect,
        config: Config,
        watch: Watch,
        deadline: float,
        mpi: MpiRanks | None,
        listener_settings: ListenerSettings | None,
    ) -> None:
        self._group = group
        self._rank = rank
        self._endpoints = endpoints
        self._connect = connect
        self._config = config
        self._watch = watch
        self._deadline = deadline
        self._mpi = mpi
        self._listener_settings = listener_settings
        self._settings = EngineSettings(
            # After the timeout, the peer that still answers but makes no progress is to blame.
            stall_timeout=config.timeout / NO_PROGRESS_REPORTS,
            spins=placement.spins,
            piece_bytes=config.shm_piece_bytes,
            direct=config.shm_direct,
            interface=config.network_interfaces.partition(",")[0],
            hierarchical_allreduce=config.hierarchical_allreduce,
            hierarchical_allgather=config.hierarchical_allgather,
            threads=not config.mpi_threads_disable,
        )

    def build(
        self,
        ranks: Sequence[int],
        connections: Mapping[int, Connection],
        role: str,
        names: Sequence[str] = (),
        tree: Tree | None = None,
    ) -> Communicator:
        """An engine for some members (global ranks). All of them must call this.

        Args:
            connections: the connections to this rank's neighbours in the tree, by index.
            role: distinguishes the connections of this engine from those of others.
            names: the engines to choose from, even if another is forced; empty: those that the settings allow.
            tree: None: the first member is connected to every other member.
        """
        config, members = self._config, list(ranks)
        index = members.index(self._rank)

        def on_stall(stall: Stall) -> None:
            self._watch.report_no_progress(members[stall.rank], stall.reason, stall.times)

        def connect() -> Mapping[int, socket.socket]:
            made = self._connect([ConnectionKey(peer, role, self._group) for peer in members if peer != self._rank])
            return {members.index(key.peer): connection.socket for key, connection in made.items()}

        def connect_all() -> Mapping[int, Sequence[socket.socket]]:
            own, others = self._endpoints[self._rank], [peer for peer in members if peer != self._rank]
            made = self._connect(
                [key for peer in others for key in data_connections(own, self._endpoints[peer], role, self._group)]
            )
            return by_index(made, members)

        def later(name: str, chosen: str) -> Callable[[Gather], Communicator]:
            assert self._listener_settings is not None
            connections = LateConnections(self._listener_settings, members, self._rank, f"{role}.{name}", self._group)

            def build(gather: Gather) -> Communicator:
                connected = dataclasses.replace(group, connect_all=lambda: connections.connect(gather))
                return engine(chosen).build(connected, Bootstrap(), time.monotonic())

            return lambda gather: LateCommunicator(
                chosen, index, len(members), partial(build, gather), connections.cancel
            )

        def subgroup(name: str, some: Sequence[int], candidates: Sequence[str]) -> Communicator:
            return self._subgroup(f"{role}.{name}", [members[each] for each in some], candidates)

        group = EngineGroup(
            rank=index,
            size=len(members),
            hosts=tuple(self._endpoints[member].host for member in members),
            settings=self._settings,
            mpi=self._mpi and self._mpi._replace(ranks=tuple(self._mpi.ranks[member] for member in members)),
            on_stall=on_stall,
            connect=connect,
            connect_all=connect_all,
            later=None if self._listener_settings is None else later,
            subgroup=subgroup,
            cross=config.cpu_operations,
            deadline=self._deadline,
        )
        forced = "" if names else config.cpu_operations
        if forced and config.hierarchical_allreduce and not engine(HIERARCHICAL).obstacle(group):
            forced = (
                HIERARCHICAL  # with what is forced between the hosts; where there is one host, the flag has no meaning
            )
        exchange = ExchangeOverConnections(members, connections, index, self._deadline, tree)
        return build_engine(group, exchange, forced, CPU_OPERATIONS, self._deadline, names)

    def with_alternatives(
        self, chosen: Communicator, ranks: Sequence[int], connections: Mapping[int, Connection], tree: Tree
    ) -> Communicator:
        """The engine, wrapped with the alternatives that autotuning may choose. Every member calls it.

        Args: as of :meth:`build`.
        """
        built = [chosen]
        if len(ranks) > 1 and not {CPU_OPERATIONS, GPU_OPERATIONS} & self._config.explicit:
            for name in [each.name for each in ENGINES[HOST] if each.automatic and each.name != chosen.name]:
                try:
                    built.append(self.build(ranks, connections, f"{DATA}.{name}", [name], tree))
                except EngineError as error:
                    _log.debug("autotuning leaves %s out: %s", name, error)
                except BaseException:
                    for engine in built:
                        engine.abort()
                        engine.close()
                    raise
        return SwitchingCommunicator(built)

    def _subgroup(self, role: str, ranks: Sequence[int], names: Sequence[str]) -> Communicator:
        """Build an engine for some of the members, over connections of their own."""
        peers = list(ranks[1:]) if self._rank == ranks[0] else [ranks[0]]
        made = self._connect([ConnectionKey(peer, f"{role}.control", self._group) for peer in peers if len(ranks) > 1])
        try:
            return self.build(
                ranks, {list(ranks).index(key.peer): connection for key, connection in made.items()}, role, names
            )
        finally:
            for connection in made.values():
                connection.close()
