"""Ranks on this machine, each a child of the launcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from horovod.runner import worker_environment
from horovod.runner.hosts import SlotInfo
from horovod.runner.processes import ProcessPlan
from horovod.runner.strategies.base import Strategy


class Local(Strategy):
    def plan(
        self, command: Sequence[str], slots: Sequence[SlotInfo], environment: Mapping[str, str]
    ) -> list[ProcessPlan]:
        return [
            ProcessPlan(
                rank=slot.rank,
                place=f"{slot.hostname}, local rank {slot.local_rank}",
                command=tuple(command),
                environment={**environment, **worker_environment.of_rank(slot)},
            )
            for slot in slots
        ]
