"""The Engine contract: how an engine says whether it can serve a group of ranks, and how the group builds it.

Each engine is one folder with a subclass of :class:`Engine`, listed in :mod:`horovod.comm.select`. Importing that subclass
must be cheap: only methods that are called on a chosen or forced engine import its library.

A group builds its engine in these steps, which all of its ranks take together (:mod:`horovod.core.engines.engine_building`):

1. Each rank calls :meth:`~Engine.obstacle` of the candidates, and sends the results to the others.
2. The group's first rank calls :meth:`~Engine.bootstrap` of the best engine without obstacles, and sends the result to all.
3. Every rank calls :meth:`~Engine.build`. If that fails on a rank, all ranks get the reason, and try the next engine.
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
    """The version of an installed package; "" if no installed package has this name."""
    import importlib.metadata  # here, since it imports much, such as the package email, and no rank needs it to start

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def is_at_least(version: str, wanted: str) -> bool:
    """Whether ``version`` is ``wanted`` or newer; both have the form ``major.minor.patch`` with any suffix."""

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
        stall_timeout: how long a peer may make no progress inside a collective before ``on_stall`` is called.
        spins: whether this rank, and every rank that may use its cores, has a core to itself, so that it may poll for a while
            before it sleeps.
        piece_bytes: bytes that each rank moves through shared memory at a time; 0 for the default.
        direct: whether the ranks of a host read one another's memory: "auto" (if that is faster), "always" or "never".
        interface: the network interface to use; "" for any.
        hierarchical_allreduce, hierarchical_allgather: whether the operation takes the three steps of the hierarchical engine;
            None leaves the choice to the engine.
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
"""All-gathers bytes: sends those of this rank to all ranks of a group, and returns the bytes of all ranks, by index. All ranks
must call it together."""


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
        rank, size: this rank's index in the group, and the size of the group.
        hosts: the host name of each rank, by index.
        settings: the user's settings.
        mpi: the MPI ranks of the group; None if they are not known.
        on_stall: for the communicator: called when a peer makes no progress.
        connect: opens an authenticated connection to every other rank, by index. All ranks must call it together, once.
        connect_all: the same, with one connection for each network that two hosts share, in the same order on both.
        later: ``later(name, engine)`` is for an engine of all ranks that needs only ``connect_all``. It returns a function
            that takes an all-gather of bytes and makes a communicator, which builds the engine at its first collective. None
            if the group cannot open connections after it was built.
        subgroup: ``subgroup(name, members, candidates)`` builds an engine for some of the ranks (indices, this rank among
            them) from the named engines, best first. All members must call it together; the name distinguishes the subgroups
            of one rank.
        cross: the engine that is forced between hosts; "" for none.
        facts: of this rank's devices, for engines of device memory.
        runtime: the device to serve; None if this rank has used none.
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
        data: bytes that only the engine interprets: a unique id, an address, a size.
        descriptor: an open file descriptor that belongs to the data; -1 if there is none, and on ranks to which it could not be
            passed. The caller of :meth:`Engine.build` closes it afterwards.
    """

    data: bytes = b""
    descriptor: int = -1


class Engine(ABC):
    """One kind of engine. Stateless; the tables of :mod:`horovod.comm.select` have one object of each."""

    name: ClassVar[str]
    """The name that users write in HOROVOD_CPU_OPERATIONS or HOROVOD_GPU_OPERATIONS, in lower case."""

    automatic: ClassVar[bool] = True
    """Whether the engine may be chosen without being forced."""

    @abstractmethod
    def obstacle(self, group: EngineGroup) -> str:
        """Why the engine cannot serve this group, as far as this rank can tell alone, and what to do about it; "" if this rank
        knows no reason. Every rank of the group calls it before an engine is chosen.

        It must be quick and change nothing. The engine ``mpi`` is the exception: it starts MPI, if it is forced."""

    def not_alone(self) -> str:
        """Advice for ranks that share a device, if the engine cannot serve them; "" if it can."""
        return ""

    def lacks(
        self,
        data_types: Sequence[DataType],
        op: ReduceOp | None,
        scaled: bool,
        factor: float = 1.0,
        scales: bool = False,
    ) -> str:
        """The feature that the engine lacks for a collective, as a text; "" if the engine can carry it out. Pure: ranks that
        call it with the same arguments get the same answer.

        Args:
            data_types: the types of the collective's elements.
            op: the reduction; None for a collective that only moves elements.
            scaled: whether the reduction is an average or has factors.
            factor: the product of these factors; 1 if there are none.
            scales: whether the framework has a kernel that multiplies (:attr:`~horovod.comm.device.DeviceRuntime.scales`).
        """
        return ""

    def installed(self) -> str:
        """The version of the engine's library; "" if no usable one is installed. Must not import a large package."""
        return "built in"

    def bootstrap(self, group: EngineGroup) -> Bootstrap:
        """The data that all ranks need for :meth:`build`. Only the group's first rank calls it.

        Raises:
            EngineError, OSError: it cannot be made, so the engine cannot serve the group.
        """
        return Bootstrap()

    @abstractmethod
    def build(self, group: EngineGroup, bootstrap: Bootstrap, deadline: float) -> Communicator:
        """This rank's communicator. Every rank of the group must call it.

        Args:
            group: the ranks to serve.
            bootstrap: what :meth:`bootstrap` has returned on the first rank; its ``data`` are the same on all ranks.
            deadline: ``time.monotonic`` by which it must have succeeded or failed.

        Raises:
            EngineError, OSError, ValueError: the communicator cannot be built; the message says why and what to do.
        """
