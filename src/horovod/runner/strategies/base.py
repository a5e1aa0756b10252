"""How the ranks of a job become processes of this machine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from horovod.runner.hosts import SlotInfo
from horovod.runner.processes import ProcessPlan


class Strategy(ABC):
    """One way to start ranks: directly, through ssh, through a program such as mpirun. Siblings are stateless."""

    @abstractmethod
    def plan(
        self, command: Sequence[str], slots: Sequence[SlotInfo], environment: Mapping[str, str]
    ) -> list[ProcessPlan]:
        """What to start here, so that every slot gets its rank.

        Args:
            command: what each rank runs.
            slots: the places of the ranks, by rank.
            environment: what all ranks have in common. It holds the job's secret: never put it on a command line.
        """
