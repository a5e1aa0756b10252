"""The Engine contract: how an engine says whether it can serve a group of ranks, and how it is built there.

Each engine is one folder with a subclass of :class:`Engine`, listed in :mod:`horovod.comm.select`. Importing that subclass
must be cheap: only methods that are called on a chosen or forced engine import its library.

A group builds its engine in these steps, which all of its ranks take together (:mod:`horovod.core.engines.engine_building`):

1. Each rank asks the candidates for their :meth:`~Engine.obstacle`, and tells the others.
2. The group's first rank makes the :meth:`~Engine.bootstrap` of the best engine without obstacles, and sends it to all.
3. Every rank calls :meth:`~Engine.build`. If that fails on a rank, all ranks learn why, and try the next engine.
"""

from __future__ import annotations

import math
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

from horovod.comm.base import Communicator, OnStall, give_up
from horovod.comm.datatypes import DataType
from horovod.comm.device import NO_DEVICES, DeviceFacts, DeviceRuntime
from horovod.comm.reduction import ReduceOp


class EngineError(RuntimeError):
    """An engine cannot serve a group; the message says why and what to do."""


def version_of(distribution: str) -> str:
    """The version of a package as it was installed, "" if no installed package has this name."""
    import importlib.metadata  # here, since it imports much, such as the package email, and no rank needs it to start

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def is_at_least(version: str, wanted: str) -> bool:
    """Whether a version is ``wanted`` or newer; both as ``major.minor.patch`` with any suffix."""

    def parts(text: str) -> tuple[int, ...]:
        numbers = []
        for part in text.split("+")[0].split(".")[:3]:
            digits = "".join(character for character in part if character.isdigit())
            numbers.append(int(digits or 0))
        return tuple(numbers)

    return parts(version) >= parts(wanted)


@dataclass(frozen=True)
class EngineSettings:
    """The user's settings for engines; the same on all ranks of a job, except ``interface`` and ``spins``.

    Attributes:
        stall_timeout: how long a peer may make no progress inside a collective until ``on_stall`` is called.
        spins: every rank has a core to itself, so it may poll for a while before it sleeps.
        piece_bytes: bytes each rank moves through shared memory at a time; 0 for the default.
        direct: how the ranks of a host read one another's memory: "auto", "always" or "never".
        interface: the network interface to use, or "" for any.
        hierarchical_allreduce, hierarchical_allgather: None leaves the choice to the engine.
        threads: whether MPI may be initialised for calls from several threads.
    """

    stall_timeout: timedelta = timedelta(seconds=10)
    spins: bool = True
    piece_bytes: int = 0
    direct: str = "auto"
    interface: str = ""
    hierarchical_allreduce: bool | None = None
    hierarchical_allgather: bool | None = None
    threads: bool = True


class MpiRanks(NamedTuple):
    """The MPI ranks of a group.

    Attributes:
        communicator: the mpi4py communicator that the job was made from; None for ``MPI.COMM_WORLD``.
        size: how many ranks the communicator has, according to the launcher.
        ranks: the group's ranks in the communicator, in group order.
    """

    communicator: Any
    size: int
    ranks: tuple[int, ...]


Gather = Callable[[bytes], Sequence[bytes]]
"""Passes bytes to all ranks of a group, and returns those of all by index. All ranks must call it together."""


def _none() -> Mapping[int, socket.socket]:
    raise EngineError("this group cannot open connections")


def _none_at_all() -> Mapping[int, Sequence[socket.socket]]:
    raise EngineError("this group cannot open connections")


def _no_subgroup(name: str, members: Sequence[int], candidates: Sequence[str]) -> Communicator:
    raise EngineError("this group cannot be divided")


@dataclass(frozen=True)
class EngineGroup:
    """The ranks that an engine is to serve, as one of them sees them.

    Attributes:
        rank, size: this rank's index in the group, and how many there are.
        hosts: the host name of each, by index.
        mpi: their ranks in MPI, or None if these are not known.
        on_stall: for the communicator.
        connect: opens an authenticated connection to every other rank, by index. All ranks must call it together, once.
        connect_all: the same, with one connection for each network that two hosts share, in the same order on both.
        later: ``later(name, engine)`` is for an engine of all ranks which needs only ``connect_all``. It returns a function
            that takes an all-gather of bytes and makes a communicator, which builds the engine at its first collective. None
            if no connections can be made then.
        subgroup: ``subgroup(name, members, candidates)`` builds an engine for some of the ranks (indices, this rank among
            them) from the named engines, best first. All members must call it together; the name distinguishes the subgroups
            of one rank.
        cross: the engine that is forced between hosts, or "".
        facts: of this rank's devices, for engines of device memory.
        runtime: the device to serve, if there is one.
        deadline: ``time.monotonic`` by which all ranks must have exchanged their obstacles.
        meanwhile: called repeatedly by a build that waits for peers, to show other ranks that this one is alive.
    """

    rank: int
    size: int
    hosts: tuple[str, ...]
    settings: EngineSettings = EngineSettings()
    mpi: MpiRanks | None = None
    on_stall: OnStall = give_up
    connect: Callable[[], Mapping[int, socket.socket]] = _none
    connect_all: Callable[[], Mapping[int, Sequence[socket.socket]]] = _none_at_all
    later: Callable[[str, str], Callable[[Gather], Communicator]] | None = None
    subgroup: Callable[[str, Sequence[int], Sequence[str]], Communicator] = _no_subgroup
    cross: str = ""
    facts: DeviceFacts = NO_DEVICES
    runtime: DeviceRuntime | None = None
    deadline: float = math.inf
    meanwhile: Callable[[], None] = lambda: None


class Bootstrap(NamedTuple):
    """The message of the group's first rank to all members, including itself.

    Attributes:
        data: opaque bytes: a unique id, an address, a size.
        descriptor: an open file descriptor that goes with them, or -1. It is -1 on ranks to which it could not be passed. The
            caller of :meth:`Engine.build` closes it afterwards.
    """

    data: bytes = b""
    descriptor: int = -1


class Engine(ABC):
    """One kind of engine. Stateless; the tables of :mod:`horovod.comm.select` have one object of each."""

    name: ClassVar[str]
    """As users write it in HOROVOD_CPU_OPERATIONS or HOROVOD_GPU_OPERATIONS, in lower case."""

    automatic: ClassVar[bool] = True
    """Whether it is chosen if it can run; otherwise only if it is forced."""

    @abstractmethod
    def obstacle(self, group: EngineGroup) -> str:
        """Why it cannot serve this group, as far as this rank can tell alone, with what to do about it; "" if nothing is known
        against it. Quick, and without effects: every rank of the group calls it before an engine is chosen."""

    def not_alone(self) -> str:
        """Advice for ranks that share a device; "" if the engine serves them all the same."""
        return ""

    def lacks(
        self,
        data_types: Sequence[DataType],
        op: ReduceOp | None,
        scaled: bool,
        factor: float = 1.0,
        scales: bool = False,
    ) -> str:
        """The feature that the engine lacks for a collective on these types; "" if it can carry it out. Pure: the same answer
        on ranks that agree.

        Args:
            op: the reduction; None for a collective that only moves elements.
            scaled: the reduction is an average, or has factors.
        """
        return ""

    def installed(self) -> str:
        """The version of the engine's library; "" if no usable one is installed. Imports nothing large."""
        return "built in"

    def bootstrap(self, group: EngineGroup) -> Bootstrap:
        """The bootstrap data that all members need to build. Called on the group's first rank only.

        Raises:
            EngineError, OSError: it cannot be made, so the engine cannot serve the group.
        """
        return Bootstrap()

    @abstractmethod
    def build(self, group: EngineGroup, bootstrap: Bootstrap, deadline: float) -> Communicator:
        """This rank's communicator. Every rank of the group calls it, with the same bytes.

        Args:
            deadline: ``time.monotonic`` by which it must have succeeded or failed.

        Raises:
            EngineError, OSError, ValueError: it cannot be built; the message says why and what to do.
        """
