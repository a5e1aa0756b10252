"""Puts one process set together: its control connections, its engine, its worker thread. Runs in ``init()``, on every member.

The coordinator offers a shared arena to members on its host by passing a descriptor; who can map it says so; the
coordinator tells everybody which engine it will be. Only when that is tcp do the members connect to one another.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from horovod.comm.base import Communicator, Stall
from horovod.comm.select import EngineError, choose
from horovod.comm.shm.arena import Arena
from horovod.comm.shm.communicator import ShmCommunicator
from horovod.comm.shm.proposals import Proposals
from horovod.comm.single import SingleCommunicator
from horovod.comm.tcp.communicator import TcpCommunicator
from horovod.control.channel import Channel
from horovod.control.dial import receive_exactly
from horovod.control.failure_detector import NO_PROGRESS_REPORTS
from horovod.control.framing import LENGTH_BYTES, frame
from horovod.control.mesh import ConnectionKey, Endpoint, data_wires
from horovod.core.config import CPU_OPERATIONS, Config
from horovod.core.coordination.role import Watch
from horovod.core.execution.cpu_affinity import Placement
from horovod.core.execution.worker import WorkerThread

_log = logging.getLogger("horovod.core")

CONTROL = "control"
DATA = "data"


class _Bootstrap(msgspec.Struct, array_like=True):
    """Coordinator to member: a descriptor of an arena of this many bytes comes along, if any."""

    arena_bytes: int
    piece_bytes: int


_decode_bootstrap = msgspec.msgpack.Decoder(_Bootstrap).decode


class _Reply(msgspec.Struct, array_like=True):
    """Member to coordinator."""

    forced: str
    shm_obstacle: str


_decode_reply = msgspec.msgpack.Decoder(_Reply).decode


class _Choice(msgspec.Struct, array_like=True):
    """Coordinator to member."""

    engine: str
    reading: str
    error: str


_decode_choice = msgspec.msgpack.Decoder(_Choice).decode


Connect = Callable[[list[ConnectionKey]], dict[ConnectionKey, socket.socket]]
"""Connects to the given peers, all of whom do the same."""


def control_connections(group: int, ranks: Sequence[int], rank: int) -> list[ConnectionKey]:
    """The control connections of one member: all members with the first."""
    if rank == ranks[0]:
        return [ConnectionKey(peer, CONTROL, group) for peer in ranks[1:]]
    return [ConnectionKey(ranks[0], CONTROL, group)]


def assemble(
    group: int,
    ranks: Sequence[int],
    rank: int,
    placement: Placement,
    endpoints: Sequence[Endpoint],
    sockets: Mapping[ConnectionKey, socket.socket],
    connect: Connect,
    config: Config,
    watch: Watch,
    on_stopped: Callable[[int, str, bool], None],
    deadline: float,
) -> WorkerThread:
    """Build the worker thread of process set ``group`` on this rank, ready to start. Every member must call it.

    Args:
        ranks: the members' global ranks in set order; ``rank`` is this process's.
        placement: where the worker thread runs, and whether it may look for a peer before it sleeps.
        sockets: made from :func:`control_connections`.
        connect: makes further connections among the members, if the engine needs them.
        deadline: ``time.monotonic`` by which all members must have answered.

    Raises:
        EngineError: no engine can serve this group, or the one that was forced cannot.
        OSError: a member did not answer.
    """
    index = list(ranks).index(rank)
    connections = {list(ranks).index(key.peer): sockets[key] for key in control_connections(group, ranks, rank)}
    communicator: Communicator
    proposals: Proposals | None = None
    if len(ranks) == 1:
        choose([config.cpu_operations], [""], CPU_OPERATIONS)  # a wrong name is an error in a group of one, too
        communicator = SingleCommunicator()
    else:
        hosts = [endpoints[member].host for member in ranks]
        arena, choice = (
            _lead_bootstrap(hosts, connections, config, deadline)
            if index == 0
            else _follow_bootstrap(connections[0], config, deadline)
        )
        stall_timeout = (
            config.timeout / NO_PROGRESS_REPORTS
        )  # so that who answers and stays stuck is to blame after the timeout

        def on_stall(stall: Stall) -> None:
            watch.report_no_progress(ranks[stall.rank], stall.reason, stall.times)

        if choice.engine == "shm":
            assert arena is not None
            communicator = ShmCommunicator(
                index, len(ranks), arena, stall_timeout, choice.reading, on_stall, placement.spins
            )
            proposals = Proposals(arena, index, len(ranks))
        else:
            if arena is not None:
                arena.close()
            others = [endpoints[peer] for peer in ranks if peer != rank]
            mesh = connect([key for other in others for key in data_wires(endpoints[rank], other, DATA, group)])
            peers: dict[int, socket.socket] = {}
            more: dict[int, list[socket.socket]] = {}
            for key in sorted(mesh):
                member = list(ranks).index(key.peer)
                if key.link:
                    more.setdefault(member, []).append(mesh[key])
                else:
                    peers[member] = mesh[key]
            communicator = TcpCommunicator(index, peers, stall_timeout, on_stall, more=more)
    channels = {member: Channel(connection) for member, connection in connections.items()}
    return WorkerThread(
        str(group), ranks, index, channels, communicator, config, watch, on_stopped, placement, proposals
    )


def _lead_bootstrap(
    hosts: Sequence[str], connections: Mapping[int, socket.socket], config: Config, deadline: float
) -> tuple[Arena | None, _Choice]:
    size = len(hosts)
    arena, own_obstacle = None, ""
    if config.cpu_operations != "tcp":
        if sys.platform != "linux":
            own_obstacle = f"shared memory needs Linux, this is {sys.platform}"
        elif len(set(hosts)) > 1:
            own_obstacle = f"its ranks are on several hosts ({', '.join(sorted(set(hosts)))})"
        else:
            try:
                arena = Arena.create(size, config.shm_piece_bytes)
            except OSError as error:
                own_obstacle = f"no shared memory could be created ({error})"
    try:
        choice = _settle(connections, arena, own_obstacle, config, deadline)
    except BaseException:
        if arena is not None:
            arena.close()
        raise
    return arena, choice


def _settle(
    connections: Mapping[int, socket.socket], arena: Arena | None, own_obstacle: str, config: Config, deadline: float
) -> _Choice:
    """Offer the arena, hear everybody, choose, and tell everybody. Raises EngineError where no engine can be chosen."""
    bootstrap = frame(
        msgspec.msgpack.encode(_Bootstrap(arena.length if arena else 0, arena.piece_bytes if arena else 0))
    )
    for connection in connections.values():
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        if arena is not None and connection.family == socket.AF_UNIX:
            socket.send_fds(connection, [bootstrap], [arena.descriptor])
        else:
            connection.sendall(bootstrap)
    obstacles, requested_sets = [own_obstacle], [config.cpu_operations]
    for connection in connections.values():
        reply = _decode_reply(_receive(connection, deadline))
        obstacles.append(reply.shm_obstacle)
        requested_sets.append(reply.forced)
    try:
        choice = _Choice(choose(requested_sets, obstacles, CPU_OPERATIONS), config.shm_direct, "")
    except EngineError as error:
        choice = _Choice("", "never", str(error))
    for connection in connections.values():
        connection.sendall(frame(msgspec.msgpack.encode(choice)))
    if choice.error:
        raise EngineError(choice.error)
    why = "; ".join(f"member {index}: {obstacle}" for index, obstacle in enumerate(obstacles) if obstacle)
    _log.info(
        "a process set of %d ranks exchanges host memory by %s%s",
        len(obstacles),
        choice.engine,
        f" ({why})" if why else "",
    )
    return choice


def _follow_bootstrap(connection: socket.socket, config: Config, deadline: float) -> tuple[Arena | None, _Choice]:
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    if connection.family == socket.AF_UNIX:
        data, descriptors, _, _ = socket.recv_fds(connection, LENGTH_BYTES, 1)
        data += receive_exactly(connection, LENGTH_BYTES - len(data), deadline)
    else:
        data, descriptors = receive_exactly(connection, LENGTH_BYTES, deadline), []
    body = receive_exactly(connection, int.from_bytes(data, "big"), deadline)
    bootstrap = _decode_bootstrap(body)
    arena, obstacle = None, ""
    if not bootstrap.arena_bytes:
        obstacle = "" if config.cpu_operations == "tcp" else "the set's first rank offered no shared memory"
    elif not descriptors:
        obstacle = "no descriptor can be passed to it: it runs in another network namespace or container"
    else:
        try:
            arena = Arena.attach(descriptors[0], bootstrap.arena_bytes, bootstrap.piece_bytes)
        except (OSError, ValueError) as error:
            obstacle = f"it cannot map the shared memory ({error})"
        finally:
            os.close(descriptors[0])
    connection.sendall(frame(msgspec.msgpack.encode(_Reply(config.cpu_operations, obstacle))))
    choice = _decode_choice(_receive(connection, deadline))
    if choice.error:
        if arena is not None:
            arena.close()
        raise EngineError(choice.error)
    return arena, choice


def _receive(connection: socket.socket, deadline: float) -> bytes:
    length = int.from_bytes(receive_exactly(connection, LENGTH_BYTES, deadline), "big")
    if length > mmap.PAGESIZE * 16:
        raise ConnectionError(f"a message of {length} bytes was announced while an engine was chosen")
    return receive_exactly(connection, length, deadline)
