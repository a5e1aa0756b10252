"""Every data-plane engine, as a group of ranks inside this one process: one thread a rank.

An engine is one line in :data:`ENGINES`; the tables of ``tests/parallel/test_engines.py`` then run on it.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from horovod.comm.base import Communicator, give_up
from horovod.comm.bytewise.communicator import PIECE_BYTES
from horovod.comm.ccl.collectives import OneCclCollectives
from horovod.comm.ccl.engine import OneCclCommunicator
from horovod.comm.engine import Bootstrap, EngineGroup
from horovod.comm.gloo.engine import GlooCommunicator
from horovod.comm.hierarchical.communicator import PIECE_BYTES as HIERARCHICAL_PIECE_BYTES
from horovod.comm.hierarchical.communicator import HierarchicalCommunicator
from horovod.comm.hierarchical.rank_grid import RankGrid
from horovod.comm.shm.arena import Arena
from horovod.comm.shm.communicator import ShmCommunicator
from horovod.comm.shm.engine import SharedProposals
from horovod.comm.shm.proposals import Proposals, memory_bytes
from horovod.comm.shm.shared_memory import created
from horovod.comm.single import SingleCommunicator
from horovod.comm.spans import Vectors
from horovod.comm.tcp.communicator import TcpCommunicator
from late_oneccl import LateLibrary
from mpi_ranks import group_under, prefix_of
from part import one_of, some
from time_limits import SOON
from torch_versions import GLOO

_T = TypeVar("_T")

TIMEOUT = timedelta(seconds=30)
"""Of a collective, in tests that expect none to fail."""

SMALL = 3
"""Up to so many ranks, a group tries all data types."""

Factory = Callable[[int, timedelta], list[Communicator]]


@dataclass(frozen=True)
class Engine:
    """How to make a group.

    Attributes:
        make: ``make(size, timeout)`` returns the communicators of a group, by rank.
        sizes: the group sizes at which the tables run on it.
        hosts: ``hosts(size)`` tells by rank on which host it is, where allreduces are folded host by host; else "".
        piece: ``piece(size)`` is how many bytes of a batch travel together, where that is made small to have many
            pieces in little data; 0 where it is as for users.
        all_types: whether the tables run on it with all data types. With few, if another engine does the arithmetic and
            it moves bytes.
    """

    make: Factory
    sizes: Sequence[int]
    hosts: Callable[[int], str] = lambda size: ""
    piece: Callable[[int], int] = lambda size: 0
    all_types: bool = True


_SMALL_PIECE = 4096


def _of_a_batch(size: int) -> int:
    """The small piece of an engine whose pieces are of a whole batch."""
    return _SMALL_PIECE


def _of_each_share(size: int) -> int:
    """The small piece of an engine whose pieces are of the share of the batch that each rank reduces."""
    return _SMALL_PIECE * size


def tcp_sockets(
    size: int, connect: Callable[[], tuple[socket.socket, socket.socket]]
) -> list[dict[int, socket.socket]]:
    """A full mesh of connections: by rank, the socket to each other rank."""
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for low in range(size):
        for high in range(low + 1, size):
            sockets[low][high], sockets[high][low] = connect()
    return sockets


def loopback_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected TCP sockets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = socket.create_connection(listener.getsockname())
        second, _ = listener.accept()
    return first, second


def host_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected TCP sockets with different addresses, as those of two hosts."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = socket.create_connection(listener.getsockname(), source_address=("127.0.0.2", 0))
        second, _ = listener.accept()
    return first, second


def _single(size: int, timeout: timedelta) -> list[Communicator]:
    return [SingleCommunicator()]


def _tcp(size: int, timeout: timedelta) -> list[Communicator]:
    return [TcpCommunicator(rank, peers, timeout) for rank, peers in enumerate(tcp_sockets(size, socket.socketpair))]


def _tcp_loopback(size: int, timeout: timedelta) -> list[Communicator]:
    return [TcpCommunicator(rank, peers, timeout) for rank, peers in enumerate(tcp_sockets(size, loopback_pair))]


def _tcp_small_pieces(size: int, timeout: timedelta) -> list[Communicator]:
    meshes = enumerate(tcp_sockets(size, socket.socketpair))
    return [TcpCommunicator(rank, peers, timeout, piece_bytes=_SMALL_PIECE) for rank, peers in meshes]


def _tcp_two_links(size: int, timeout: timedelta) -> list[Communicator]:
    """As if every two ranks were on hosts with two networks in common."""
    first, second = (tcp_sockets(size, socket.socketpair) for _ in range(2))
    return [
        TcpCommunicator(
            rank,
            first[rank],
            timeout,
            piece_bytes=_SMALL_PIECE,
            more={peer: [link] for peer, link in second[rank].items()},
        )
        for rank in range(size)
    ]


def _shm(size: int, timeout: timedelta, piece_bytes: int = 0, reading: str = "never") -> list[Communicator]:
    arena = Arena.create(size, piece_bytes)
    views = [Arena.attach(arena.descriptor, arena.length, arena.piece_bytes) for _ in range(size)]
    arena.close()
    return [ShmCommunicator(rank, size, view, timeout, reading) for rank, view in enumerate(views)]


def proposals_of(size: int, contributions: bool = True) -> list[Proposals]:
    """The proposals of all ranks of a group, each with a mapping of its own."""
    kind, descriptor = SharedProposals(contributions), created(memory_bytes(size))
    try:
        hosts = ("here",) * size
        return [
            kind.build(EngineGroup(rank, size, hosts), Bootstrap(descriptor=descriptor), 0.0) for rank in range(size)
        ]
    finally:
        os.close(descriptor)


def propose(proposals: Proposals, identity: bytes, vectors: Vectors, notes: Sequence[int] = ()) -> int:
    """A proposal with one contribution, as :meth:`Proposals.contribute` and :meth:`Proposals.propose` take it."""
    proposals.contribute(vectors, 0)
    return proposals.propose(identity, notes)


def _shm_small_pieces(size: int, timeout: timedelta) -> list[Communicator]:
    return _shm(size, timeout, piece_bytes=_SMALL_PIECE)


def _shm_direct(size: int, timeout: timedelta) -> list[Communicator]:
    return _shm(size, timeout, reading="always")


def _shm_auto(size: int, timeout: timedelta) -> list[Communicator]:
    return _shm(size, timeout, reading="auto")


def _gloo(size: int, timeout: timedelta, piece_bytes: int = PIECE_BYTES) -> list[Communicator]:
    from horovod.comm.gloo.collectives import GlooCollectives  # imports PyTorch

    sockets = tcp_sockets(size, socket.socketpair)
    found: dict[int, Communicator] = {}

    def make(rank: int) -> None:
        deadline = time.monotonic() + SOON
        collectives = GlooCollectives(rank, sockets[rank], ["here"] * size, "", timeout, give_up, deadline)
        found[rank] = GlooCommunicator(rank, size, collectives, piece_bytes)

    threads = [threading.Thread(target=make, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    return [found[rank] for rank in range(size)]


def _gloo_small_pieces(size: int, timeout: timedelta) -> list[Communicator]:
    return _gloo(size, timeout, _SMALL_PIECE)


class _StandInCcl(OneCclCommunicator):
    """Lets go of what is blocked in the stand-in when it is closed, as the end of a process does."""

    library: LateLibrary

    def close(self) -> None:
        self.library.let_go()
        super().close()


def _ccl(size: int, timeout: timedelta, piece_bytes: int = PIECE_BYTES) -> list[Communicator]:
    sockets, library = tcp_sockets(size, socket.socketpair), LateLibrary()
    found: dict[int, Communicator] = {}

    def make(rank: int) -> None:
        deadline = time.monotonic() + SOON
        collectives = OneCclCollectives(library, bytes(4096), rank, size, sockets[rank], timeout, give_up, deadline)
        found[rank] = made = _StandInCcl(rank, size, collectives, piece_bytes)
        made.library = library

    threads = [threading.Thread(target=make, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    return [found[rank] for rank in range(size)]


def _ccl_small_pieces(size: int, timeout: timedelta) -> list[Communicator]:
    return _ccl(size, timeout, _SMALL_PIECE)


def blocks(size: int) -> str:
    """Two hosts, the first of which has the first half of the ranks, and one more if they are odd."""
    return "a" * -(-size // 2) + "b" * (size // 2)


def in_turns(size: int) -> str:
    """The ranks of three hosts in turns."""
    return ("abc" * size)[:size]


def hierarchical(
    hosts: str, timeout: timedelta, cross: Factory, piece_bytes: int = HIERARCHICAL_PIECE_BYTES
) -> list[Communicator]:
    size = len(hosts)
    grids = [RankGrid.of(hosts, rank) for rank in range(size)]
    flat = cross(size, timeout)
    inside: dict[int, Communicator] = {}
    across: dict[int, Communicator] = {}
    for ranks in grids[0].hosts:
        inside |= zip(ranks, _shm(len(ranks), timeout) if len(ranks) > 1 else _single(1, timeout), strict=True)
    for grid in grids:
        if grid.column is not None and grid.host == 0:
            across |= zip(grid.column, cross(len(grid.column), timeout), strict=True)
    return [
        HierarchicalCommunicator(grids[rank], inside[rank], across.get(rank), flat[rank], piece_bytes=piece_bytes)
        for rank in range(size)
    ]


def _hierarchical_blocks(size: int, timeout: timedelta) -> list[Communicator]:
    return hierarchical(blocks(size), timeout, _tcp)


def _hierarchical_in_turns(size: int, timeout: timedelta) -> list[Communicator]:
    return hierarchical(in_turns(size), timeout, _tcp, piece_bytes=_SMALL_PIECE)


def _hierarchical_gloo(size: int, timeout: timedelta) -> list[Communicator]:
    return hierarchical(blocks(size), timeout, _gloo)


def _mpich(size: int, timeout: timedelta) -> list[Communicator]:
    return group_under("mpich", size, timeout, 0)


def _open_mpi(size: int, timeout: timedelta) -> list[Communicator]:
    return group_under("openmpi", size, timeout, 0)


ENGINES: dict[str, Engine] = {
    "single": Engine(_single, sizes=[1]),
    "shm": Engine(_shm, sizes=range(2, 9)),
    "shm-small-pieces": Engine(_shm_small_pieces, sizes=[2, 3, 8], piece=_of_a_batch),
    "shm-direct": Engine(_shm_direct, sizes=[2, 3, 8]),
    "shm-auto": Engine(_shm_auto, sizes=[2]),
    "tcp": Engine(_tcp, sizes=range(1, 9)),
    "tcp-loopback": Engine(_tcp_loopback, sizes=[2, 3]),
    "tcp-small-pieces": Engine(_tcp_small_pieces, sizes=[2, 3, 8], piece=_of_each_share),
    "tcp-two-links": Engine(_tcp_two_links, sizes=[2, 3], piece=_of_each_share),
    "gloo": Engine(_gloo, sizes=[2, 3, 4]),
    "gloo-small-pieces": Engine(_gloo_small_pieces, sizes=[3], piece=_of_a_batch),
    "ccl": Engine(_ccl, sizes=[2, 3, 4]),
    "ccl-small-pieces": Engine(_ccl_small_pieces, sizes=[3], piece=_of_a_batch),
    "hierarchical": Engine(_hierarchical_blocks, sizes=[2, 3, 4], hosts=blocks),
    "hierarchical-in-turns": Engine(_hierarchical_in_turns, sizes=[3, 4, 7], hosts=in_turns, piece=_of_a_batch),
    "hierarchical-gloo": Engine(_hierarchical_gloo, sizes=[3], hosts=blocks),
}
if not GLOO:
    ENGINES = {name: engine for name, engine in ENGINES.items() if "gloo" not in name}
ENGINES |= {
    f"mpi-{name}": Engine(make, sizes=sizes, all_types=False)
    for name, make, sizes in (("mpich", _mpich, [2, 3, 4]), ("openmpi", _open_mpi, [3]))
    if prefix_of(name) is not None
}

SEVERAL = [name for name, engine in ENGINES.items() if max(engine.sizes) > 1]
"""The engines of groups that can fail."""


def sizes_of(engine: str, test: str) -> Sequence[int]:
    """How many ranks the groups have that a test runs on: in the part a small group, for all data types, and a larger one."""
    sizes = ENGINES[engine].sizes
    parted = [[each for each in sizes if each <= SMALL], [each for each in sizes if each > SMALL]]
    return some(sizes, [one_of(part, f"{test} {engine}") for part in parted if part])


class RankGroup(list[Communicator]):
    """A group's communicators, by rank.

    Attributes:
        hosts, piece, all_types: as of :class:`Engine`, for its size.
    """

    hosts = ""
    piece = 0
    all_types = True


def make_group(engine: str, size: int, timeout: timedelta = TIMEOUT) -> RankGroup:
    """A new group, by rank. Whoever makes it closes its communicators."""
    table = ENGINES[engine]
    group = RankGroup(table.make(size, timeout))
    group.hosts, group.piece, group.all_types = table.hosts(size), table.piece(size), table.all_types
    return group


@contextmanager
def group_of(engine: str, size: int, timeout: timedelta = TIMEOUT) -> Iterator[RankGroup]:
    """A group for the length of a ``with`` block."""
    group = make_group(engine, size, timeout)
    try:
        yield group
    finally:
        for communicator in group:
            communicator.close()


def outcomes(
    group: Sequence[Communicator], function: Callable[[Communicator], _T], timeout: float = SOON
) -> list[_T | BaseException]:
    """Run ``function(communicator)`` in one thread a rank; by rank, what it returned or raised.

    Raises:
        TimeoutError: some ranks did not end within ``timeout`` seconds, nor after an abort. Names them.
    """
    found: dict[int, _T | BaseException] = {}

    def run(communicator: Communicator) -> None:
        try:
            found[communicator.rank] = function(communicator)
        except BaseException as error:
            found[communicator.rank] = error

    threads = [threading.Thread(target=run, args=(communicator,), daemon=True) for communicator in group]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    hanging = [communicator.rank for communicator, thread in zip(group, threads, strict=True) if thread.is_alive()]
    if hanging:
        for communicator in group:
            communicator.abort()
        for thread in threads:
            thread.join(5.0)
        raise TimeoutError(f"ranks {hanging} did not finish within {timeout:g} seconds; the others: {found}")
    return [found[communicator.rank] for communicator in group]


def run_ranks(group: Sequence[Communicator], function: Callable[[Communicator], _T], timeout: float = SOON) -> list[_T]:
    """Run ``function(communicator)`` in one thread a rank and return the results, by rank.

    When a rank raises, the others are aborted, and its exception is raised here.
    """
    first: list[BaseException] = []

    def guarded(communicator: Communicator) -> Any:
        try:
            return function(communicator)
        except BaseException as error:
            first.append(error)
            for other in group:
                other.abort()
            raise

    results = outcomes(group, guarded, timeout)
    if first:
        raise first[0]
    return results  # type: ignore[return-value]  # none of them is an exception, or it would be in ``first``
