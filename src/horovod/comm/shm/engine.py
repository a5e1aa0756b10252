"""Chooses and builds the engine ``shm``: one rank creates the shared memory, and passes its descriptor to the others."""

from __future__ import annotations

import os
import sys
from typing import ClassVar

import msgspec

from horovod.comm.engine import Bootstrap, Engine, EngineError, EngineGroup
from horovod.comm.shm.arena import Arena
from horovod.comm.shm.communicator import ShmCommunicator
from horovod.comm.shm.proposals import Proposals, memory_bytes
from horovod.comm.shm.shared_memory import SharedMemory, created, duplicated


class _ArenaSize(msgspec.Struct, array_like=True):
    arena_bytes: int
    piece_bytes: int


_decode = msgspec.msgpack.Decoder(_ArenaSize).decode


class ShmEngine(Engine):
    """Serves ranks of one host."""

    name: ClassVar[str] = "shm"

    def obstacle(self, group: EngineGroup) -> str:
        if sys.platform != "linux":
            return f"shared memory needs Linux, this is {sys.platform}"
        if len(set(group.hosts)) > 1:
            return f"the group's ranks are on several hosts ({', '.join(sorted(set(group.hosts)))})"
        return ""

    def bootstrap(self, group: EngineGroup) -> Bootstrap:
        try:
            arena = Arena.create(group.size, group.settings.piece_bytes)
        except OSError as error:
            raise EngineError(f"no shared memory could be created ({error})") from error
        try:
            return Bootstrap(
                msgspec.msgpack.encode(_ArenaSize(arena.length, arena.piece_bytes)), os.dup(arena.descriptor)
            )
        finally:
            arena.close()

    def build(self, group: EngineGroup, bootstrap: Bootstrap, deadline: float) -> ShmCommunicator:
        _check_passed(bootstrap)
        sizes, settings = _decode(bootstrap.data), group.settings
        try:
            arena = Arena.attach(bootstrap.descriptor, sizes.arena_bytes, sizes.piece_bytes)
        except (OSError, ValueError) as error:
            raise EngineError(f"it cannot map the shared memory ({error})") from error
        return ShmCommunicator(
            group.rank, group.size, arena, settings.stall_timeout, settings.direct, group.on_stall, settings.spins
        )


class SharedProposals:
    """Builds the shared memory of the proposals, in the same steps as an :class:`~horovod.comm.engine.Engine`.

    Args:
        contributions: as in :class:`~horovod.comm.shm.proposals.Proposals`.
    """

    def __init__(self, contributions: bool) -> None:
        self._contributions = contributions

    def bootstrap(self, group: EngineGroup) -> Bootstrap:
        return Bootstrap(descriptor=created(memory_bytes(group.size)))

    def build(self, group: EngineGroup, bootstrap: Bootstrap, deadline: float) -> Proposals:
        _check_passed(bootstrap)
        length = memory_bytes(group.size)
        memory = SharedMemory(duplicated(bootstrap.descriptor, length), length)
        return Proposals(memory, group.rank, group.size, self._contributions)


def _check_passed(bootstrap: Bootstrap) -> None:
    if bootstrap.descriptor < 0:
        raise EngineError("no descriptor can be passed to it: it runs in another network namespace or container")
