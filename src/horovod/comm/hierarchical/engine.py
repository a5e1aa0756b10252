"""Chooses and builds the engine ``hierarchical`` from two or three other engines: one within the host, one between hosts for
the ranks in columns, and one for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import ClassVar

from horovod._base.config import HIERARCHICAL_ALLREDUCE
from horovod.comm.base import Communicator
from horovod.comm.engine import Bootstrap, Engine, EngineError, EngineGroup, Gather
from horovod.comm.hierarchical.communicator import HierarchicalCommunicator
from horovod.comm.hierarchical.rank_grid import RankGrid

INSIDE = ("shm", "tcp")
"""The engines that may serve the ranks of one host, best first."""

BETWEEN = ("tcp", "gloo", "mpi", "ccl")
"""The engines that may serve between hosts: the first one, unless another one is forced."""


class HierarchicalEngine(Engine):
    """Serves ranks of several hosts, some of which have several ranks."""

    name: ClassVar[str] = "hierarchical"

    def obstacle(self, group: EngineGroup) -> str:
        grid = RankGrid.of(group.hosts, group.rank)
        if len(grid.hosts) == 1:
            return "all ranks of the group are on one host"
        if len(grid.hosts) == group.size:
            return "every host has only one rank of the group"
        settings = group.settings
        if settings.hierarchical_allreduce is False and not settings.hierarchical_allgather:
            return f"{HIERARCHICAL_ALLREDUCE}=0"
        return ""

    def build(self, group: EngineGroup, bootstrap: Bootstrap, deadline: float) -> HierarchicalCommunicator:
        grid, settings = RankGrid.of(group.hosts, group.rank), group.settings
        obstacle = self.obstacle(group)
        if obstacle:
            raise EngineError(obstacle)
        between = (group.cross,) if group.cross in BETWEEN else BETWEEN[:1]
        with ExitStack() as made:
            inside = group.subgroup("inside", grid.hosts[grid.host], INSIDE)
            made.callback(inside.close)
            across = None
            if grid.column is not None:
                across = group.subgroup("across", grid.column, between)
                made.callback(across.close)
            # A library's engine is built now and not at its first collective, since it may turn out not to work.
            flat: Communicator | Callable[[Gather], Communicator]
            if group.later is not None and between == BETWEEN[:1]:
                flat = group.later("flat", *between)
            else:
                flat = group.subgroup("flat", range(group.size), between)
            made.pop_all()
        return HierarchicalCommunicator(
            grid,
            inside,
            across,
            flat,
            allreduce=settings.hierarchical_allreduce is not False,
            allgather=settings.hierarchical_allgather is not False,
        )
