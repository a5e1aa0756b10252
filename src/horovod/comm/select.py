"""Chooses the engine that serves a group of ranks. Pure, except for packages' entry points: takes settings and obstacles, and
returns the engines to try or the reason why there is none.

A package can bring an engine for host memory: a subclass of :class:`~horovod.comm.engine.Engine` as an entry point of the group
``horovod.engines``, under the engine's name. An engine of a package is loaded and used only if HOROVOD_CPU_OPERATIONS names it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from horovod.comm.base import Communicator
from horovod.comm.ccl.engine import OneCclEngine
from horovod.comm.device import GPU
from horovod.comm.engine import Bootstrap, Engine, EngineError, EngineGroup
from horovod.comm.gloo.engine import GlooEngine
from horovod.comm.hierarchical.engine import HierarchicalEngine
from horovod.comm.mpi.engine import MpiEngine
from horovod.comm.nccl.engine import NcclEngine
from horovod.comm.shm.engine import ShmEngine
from horovod.comm.spans import HOST
from horovod.comm.tcp.engine import TcpEngine

__all__ = [
    "ENGINES",
    "EngineError",
    "Support",
    "candidates",
    "device_engine",
    "engine",
    "forced_host_engine",
    "not_alone",
    "obstacles",
]

ENGINES: Mapping[str, tuple[Engine, ...]] = {
    HOST: (ShmEngine(), HierarchicalEngine(), TcpEngine(), GlooEngine(), MpiEngine(), OneCclEngine()),
    GPU: (NcclEngine(),),
}
"""By kind of device, the engines that move its memory, best first. A group of one rank always has the engine ``single``."""

ENTRY_POINTS = "horovod.engines"
"""The group of entry points under which packages offer engines for host memory."""


class Support(NamedTuple):
    """One rank's report about engines.

    Attributes:
        forced: the engine that the rank's environment forces; "" for none.
        obstacles: by engine, why the rank cannot use it; "" if it can. Has only the engines from which the rank would choose.
    """

    forced: str
    obstacles: dict[str, str]


class _Unusable(Engine):
    """An engine of a package that is not installed here, or cannot be loaded."""

    def __init__(self, name: str, why: str) -> None:
        self.name = name  # type: ignore[misc]  # a class attribute elsewhere
        self._why = why

    def obstacle(self, group: EngineGroup) -> str:
        return self._why

    def build(self, group: EngineGroup, bootstrap: Bootstrap, deadline: float) -> Communicator:
        raise EngineError(self._why)


def engine(name: str, device: str = HOST) -> Engine:
    """The engine of that name. If no engine for host memory has it here, an engine whose obstacle says so, since a package
    may offer the engine on another rank.

    Raises:
        KeyError: there is no such engine for a device.
    """
    found = {each.name: each for each in ENGINES[device]}
    if name in found or device != HOST:
        return found[name]
    return _outside(name) or _Unusable(name, _no_such_engine(list(found)))


def _no_such_engine(names: Sequence[str]) -> str:
    return (
        f"there is no such engine in this version; use {', '.join(names)}, or one that an installed package offers as "
        f"{ENTRY_POINTS}"
    )


@functools.cache
def _outside(name: str) -> Engine | None:
    """The engine that an installed package offers under this name; None if none does."""
    from importlib.metadata import entry_points  # here, since it imports much and is hardly ever needed

    for offered in entry_points(group=ENTRY_POINTS, name=name):
        try:
            made: object = offered.load()()
        except Exception as error:
            return _Unusable(name, f"{offered.value} cannot be loaded: {type(error).__name__}: {error}")
        if isinstance(made, Engine) and made.name == name:
            return made
        return _Unusable(name, f"{offered.value}, the entry point of the engine {name}, is not an Engine of that name")
    return None


def obstacles(group: EngineGroup, forced: str = "", names: Sequence[str] = (), device: str = HOST) -> dict[str, str]:
    """By engine, why this rank cannot use it for this group; "" if it can.

    Checks only the engines from which this rank would choose, since a check may be expensive: the forced one; else those in
    ``names``; else those that may be chosen without being forced.
    """
    return {each.name: each.obstacle(group) for each in _table(forced, names, device)}


def _table(forced: str, names: Sequence[str], device: str) -> list[Engine]:
    chosen = [forced] if forced else names or [each.name for each in ENGINES[device] if each.automatic]
    known = [each.name for each in ENGINES[device]]
    return [engine(name, device) for name in chosen if name in known or device == HOST]


def check(forced: str, variable: str, device: str = HOST) -> None:
    """Check that the forced engine exists.

    Args:
        forced: the engine's name; "" for none.
        variable: the environment variable that forces it, for the message.

    Raises:
        EngineError: it does not exist.
    """
    names = [each.name for each in ENGINES[device]]
    if device == GPU:
        forced_host_engine(forced, "", variable, "")
    elif forced and forced not in names and _outside(forced) is None:
        raise EngineError(f"{variable}={forced}: {_no_such_engine(names)}. Unset it to let the best one be chosen.")


def candidates(
    support: Mapping[int, Support], variable: str, names: Sequence[str] = (), device: str = HOST
) -> list[str]:
    """The engines to try for one group of at least two ranks, best first; a single one if it is forced.

    Every rank must call it with the same arguments, and gets the same answer.

    Args:
        support: the ranks' reports, by global rank, in group order.
        variable: the name of the environment variable that forces an engine, for messages.
        names: the engines to choose from, best first; empty for those that may be chosen without being forced.
        device: the kind of device whose memory the engine moves.

    Raises:
        EngineError: the ranks force different engines, one that does not exist, or one that cannot run here; or no engine can
            serve the group.
    """
    wishes: dict[str, int] = {}
    for rank, each in support.items():
        if each.forced:
            wishes.setdefault(each.forced, rank)
    for wish in sorted(wishes):
        if not any(_is_known(wish, each.obstacles, device) for each in support.values()):
            check(wish, variable, device)
    if len(wishes) > 1:
        asked = ", ".join(f"{wish} on rank {rank}" for wish, rank in sorted(wishes.items()))
        raise EngineError(f"ranks ask for different engines with {variable}: {asked}; use one")
    wish = next(iter(wishes), "")
    table = [wish] if wish else [each.name for each in _table("", names, device)]
    possible = [name for name in table if not _why_not(name, support)]
    if wish and not possible:
        raise forced_engine_error(variable, wish, *_why_not(wish, support)[0])
    if not possible:
        found = [(name, *_why_not(name, support)[0]) for name in table]
        reasons = "; ".join(f"{name}: rank {rank}: {obstacle}" for name, rank, obstacle in found)
        raise EngineError(f"no engine can serve this group ({reasons})")
    return possible


STAGED = "host"
"""The value of HOROVOD_GPU_OPERATIONS for staging in host memory. The name of an engine for host memory means the same, and
forces that engine."""


def forced_host_engine(gpu: str, cpu: str, gpu_variable: str, cpu_variable: str) -> str:
    """The engine that is forced for host memory, by the setting for CPUs or by the setting for GPUs; "" for none.

    Args:
        gpu, cpu: the values of the settings.
        gpu_variable, cpu_variable: the names of their environment variables, for messages.

    Raises:
        EngineError: ``gpu`` names no engine, or the settings force two different engines for host memory.
    """
    hosts = [each.name for each in ENGINES[HOST]]
    devices = [each.name for each in ENGINES[GPU]]
    if gpu not in ("", STAGED, *devices, *hosts):
        raise EngineError(
            f"{gpu_variable}={gpu}: there is no such engine in this version; use {', '.join(devices)} for the memory "
            f"of GPUs, and for copies in host memory {STAGED} or one of {', '.join(hosts)}. Unset it to let the best one be "
            "chosen."
        )
    if gpu not in hosts:
        return cpu
    if cpu and cpu != gpu:
        raise EngineError(
            f"{gpu_variable}={gpu} stages GPU memory in host memory and forces the engine {gpu} there, and "
            f"{cpu_variable}={cpu} forces another one: set both to one name, or unset one"
        )
    return gpu


def device_engine(support: Mapping[int, Support], variable: str) -> tuple[str, str]:
    """The engine that moves the memory of all ranks' GPUs, and ""; or "" and the reason why tensors are staged in host memory.

    Every rank must call it with the same arguments, as for :func:`candidates`, and gets the same answer.

    Raises:
        EngineError: some rank cannot use the forced engine; the message says why and what to do.
    """
    wishes = {each.forced for each in support.values() if each.forced}
    for wish in sorted(wishes):
        check(wish, variable, GPU)
    if wishes and not wishes & {each.name for each in ENGINES[GPU]}:
        return "", f"{variable}={sorted(wishes)[0]}"
    try:
        return candidates(support, variable, device=GPU)[0], ""
    except EngineError as error:
        if wishes:
            raise EngineError(
                f"{error}. Fix that or unset it; with {variable}=HOST tensors are staged in host memory."
            ) from None
        return "", str(error)


def not_alone() -> str:
    """Advice for ranks that share a GPU, if an engine cannot serve them; "" if all engines can."""
    return next((advice for each in ENGINES[GPU] if (advice := each.not_alone())), "")


def forced_engine_error(variable: str, name: str, rank: int, obstacle: str) -> EngineError:
    """The error for a forced engine that cannot run."""
    return EngineError(f"{variable}={name} cannot serve this group: rank {rank}: {obstacle}")


def _is_known(wish: str, obstacles: Mapping[str, str], device: str) -> bool:
    """Whether a rank with these obstacles has found the forced engine, in the table or in a package."""
    names = [each.name for each in ENGINES[device]]
    return wish in names or obstacles.get(wish, _no_such_engine(names)) != _no_such_engine(names)


def _why_not(name: str, support: Mapping[int, Support]) -> list[tuple[int, str]]:
    """The ranks that cannot use an engine, each with its reason."""
    return [(rank, each.obstacles[name]) for rank, each in support.items() if each.obstacles.get(name)]
