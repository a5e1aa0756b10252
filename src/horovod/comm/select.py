"""Which engine serves a group of ranks. Pure: wishes and obstacles in, engines to try or the reason why there is none out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from horovod.comm.engine import Engine, EngineError, Group
from horovod.comm.gloo.engine import GlooEngine
from horovod.comm.hierarchical.engine import HierarchicalEngine
from horovod.comm.mpi.engine import MpiEngine
from horovod.comm.oneccl.engine import OneCclEngine
from horovod.comm.shm.engine import ShmEngine
from horovod.comm.spans import HOST
from horovod.comm.tcp.engine import TcpEngine

__all__ = ["ENGINES", "EngineError", "candidates", "engine", "obstacles"]

ENGINES: Mapping[str, tuple[Engine, ...]] = {
    HOST: (ShmEngine(), HierarchicalEngine(), TcpEngine(), GlooEngine(), MpiEngine(), OneCclEngine()),
}
"""By kind of device, the engines that move its memory, best first. A group of one has an engine of its own, ``single``."""


def engine(name: str, device: str = HOST) -> Engine:
    """The engine of that name.

    Raises:
        KeyError: there is none for this kind of device.
    """
    return {each.name: each for each in ENGINES[device]}[name]


def obstacles(group: Group, forced: str = "", names: Sequence[str] = (), device: str = HOST) -> dict[str, str]:
    """Why this rank cannot use which engine for this group, by name; "" where it can.

    Only those engines are asked that this rank would choose from, as to ask one may cost something: the forced one; else those
    named, else those that are chosen without being forced.
    """
    return {each.name: each.obstacle(group) for each in _table(forced, names, device)}


def _table(forced: str, names: Sequence[str], device: str) -> list[Engine]:
    known = {each.name: each for each in ENGINES[device]}
    chosen = [forced] if forced else names or [each.name for each in ENGINES[device] if each.automatic]
    return [known[name] for name in chosen if name in known]


def check(forced: str, variable: str, device: str = HOST) -> None:
    """Whether there is an engine of the name that is forced, "" for none.

    Raises:
        EngineError: there is not.
    """
    names = [each.name for each in ENGINES[device]]
    if forced and forced not in names:
        raise EngineError(
            f"{variable}={forced}: there is no such engine in this version; available are {', '.join(names)}. Unset it to let "
            "the best one be chosen."
        )


def candidates(
    forced: Sequence[str],
    found: Sequence[Mapping[str, str]],
    variable: str,
    names: Sequence[str] = (),
    device: str = HOST,
) -> list[str]:
    """The engines to try for one group of at least two ranks, best first; one where it is forced.

    Every rank calls it with the same arguments, and gets the same answer.

    Args:
        forced: what each rank's environment asks for, "" for no wish.
        found: by rank, its :func:`obstacles`.
        variable: the environment variable's name, for messages.
        names: the engines to choose from, best first; none: those of the device that are chosen without being forced.

    Raises:
        EngineError: the ranks ask for different engines, for one that does not exist, or for one that cannot run here.
    """
    wishes = {wish for wish in forced if wish}
    for wish in sorted(wishes):
        check(wish, variable, device)
    if len(wishes) > 1:
        raise EngineError(f"ranks ask for different engines with {variable}: {', '.join(sorted(wishes))}; use one")
    wish = next(iter(wishes), "")
    table = _table(wish, names, device)
    possible = [each.name for each in table if not _why_not(each.name, found)]
    if wish and not possible:
        raise cannot(variable, wish, *_why_not(wish, found)[0])
    if not possible:
        reasons = "; ".join(f"{each.name}: {_why_not(each.name, found)[0][1]}" for each in table)
        raise EngineError(f"no engine can serve this group ({reasons})")
    return possible


def cannot(variable: str, name: str, member: int, obstacle: str) -> EngineError:
    """The error for an engine that is forced and cannot run."""
    return EngineError(f"{variable}={name} cannot serve this group: member {member}: {obstacle}")


def _why_not(name: str, found: Sequence[Mapping[str, str]]) -> list[tuple[int, str]]:
    """The members that cannot use an engine, each with its reason. A member that would not choose it has not looked."""
    return [(member, each[name]) for member, each in enumerate(found) if each.get(name)]
