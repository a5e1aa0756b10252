"""Which engine carries a process set's host memory. Pure: facts in, the engine's name or the reason why not out."""

from __future__ import annotations

from collections.abc import Sequence

HOST_ENGINES = ("shm", "tcp")
"""Engines for host memory, best first; ``single`` serves a group of one and is not asked for."""


class EngineError(RuntimeError):
    """The engine that was forced cannot run; the message says why and what to do."""


def choose(forced: Sequence[str], shm_obstacles: Sequence[str], variable: str) -> str:
    """The engine for one group of at least two ranks.

    Args:
        forced: what each rank's environment asks for, "" for no wish.
        shm_obstacles: by rank, why it cannot use shared memory with the first; "" where it can.
        variable: the environment variable's name, for messages.

    Raises:
        EngineError: the ranks ask for different engines, for one that does not exist, or for one that cannot run here.
    """
    requested_sets = {wish for wish in forced if wish}
    unknown = sorted(requested_sets - set(HOST_ENGINES))
    if unknown:
        raise EngineError(
            f"{variable}={unknown[0]}: there is no such engine for host memory in this version; available are "
            f"{', '.join(HOST_ENGINES)}. Unset it to let the best one be chosen."
        )
    if len(requested_sets) > 1:
        raise EngineError(
            f"ranks ask for different engines with {variable}: {', '.join(sorted(requested_sets))}; use one"
        )
    wish = next(iter(requested_sets), "")
    obstacles = {rank: obstacle for rank, obstacle in enumerate(shm_obstacles) if obstacle}
    if wish == "shm" and obstacles:
        rank, obstacle = next(iter(obstacles.items()))
        raise EngineError(f"{variable}=shm cannot serve this group: member {rank}: {obstacle}")
    if wish:
        return wish
    return "tcp" if obstacles else "shm"
