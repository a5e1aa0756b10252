"""Slurm's allocation for the job that the launcher runs in. Pure: read from the launcher's environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from horovod.environments.slurm import Slurm, parse_tasks_per_node
from horovod.environments.slurm_nodes import expand_nodes
from horovod.runner.errors import UsageError

T = TypeVar("T")
_SAY_HOSTS = "or name the hosts yourself with -H, as in -H localhost:2"


@dataclass(frozen=True)
class Allocation:
    """An allocation of Slurm.

    Attributes:
        job: its number.
        nodes: the nodes, in Slurm's order.
        cpus: the number of CPUs of each node.
        gpus: the number of GPUs of each node; 0 if the variables do not tell.
        tasks: the number of tasks that the user asked for on each node; empty if the user asked for none.
        here: the node that the launcher runs on; "" if that is not a node of the job.
        copies: the number of launchers that srun has started; 1 if srun started none.
    """

    job: str
    nodes: tuple[str, ...]
    cpus: tuple[int, ...]
    gpus: int
    tasks: tuple[int, ...]
    here: str
    copies: int

    @property
    def ranks(self) -> int | None:
        """How many ranks there are if the user does not say: one per task, else one per GPU; None if there are neither."""
        if self.tasks:
            return sum(self.tasks)
        return self.gpus * len(self.nodes) or None

    def slots(self, ranks: int) -> list[int]:
        """How many ranks may run on each node, if there are to be ``ranks`` in all.

        Each task is a slot or, if there are no tasks, each GPU. More ranks may run if every rank still has a CPU or GPU: an
        interactive job of one task with eight CPUs takes eight ranks.

        Raises:
            ValueError: srun has started the launcher several times.
        """
        if self.copies > 1:
            raise UsageError(
                f"srun has started this launcher {self.copies} times, and each would start all ranks. Start it once: without "
                f"srun, in the batch script or under salloc; or start the ranks with srun, without horovodrun; {_SAY_HOSTS}"
            )
        first = self.tasks or (self.gpus,) * len(self.nodes)
        if ranks <= sum(first):
            return list(first)
        return [max(cpus, self.gpus, slots) for cpus, slots in zip(self.cpus, first, strict=True)]


def allocation(environment: Mapping[str, str]) -> Allocation | None:
    """The allocation that the process with these variables runs in; None if Slurm did not start it.

    Raises:
        ValueError: Slurm's variables do not parse or contradict one another.
    """
    job = environment.get("SLURM_JOB_ID", "")
    text = environment.get("SLURM_JOB_NODELIST", "") or environment.get("SLURM_NODELIST", "")
    if not job or not text:
        return None
    nodes = _read("SLURM_JOB_NODELIST", text, expand_nodes)
    cpus = _counts(environment, "SLURM_JOB_CPUS_PER_NODE", len(nodes)) or [1] * len(nodes)
    gpus = _gpus(environment)
    tasks: list[int] = []
    copies = 1
    if Slurm.detect(environment):  # in a step, such as an interactive shell, the tasks are the step's and not the job's
        copies = _read("SLURM_STEP_NUM_TASKS", environment.get("SLURM_STEP_NUM_TASKS") or "1", int)
    elif environment.get("SLURM_NTASKS") or environment.get("SLURM_NTASKS_PER_NODE"):
        tasks = _counts(environment, "SLURM_TASKS_PER_NODE", len(nodes))
    here = environment.get("SLURMD_NODENAME", "")
    return Allocation(job, tuple(nodes), tuple(cpus), gpus, tuple(tasks), here if here in nodes else "", copies)


def _gpus(environment: Mapping[str, str]) -> int:
    """The number of GPUs of each node, from ``--gpus-per-node`` (``4``, or ``a100:2,v100:2``), else that of this node."""
    text = environment.get("SLURM_GPUS_PER_NODE", "")
    if text:
        kinds = [kind.rpartition(":")[2] for kind in text.split(",")]
        return sum(_read("SLURM_GPUS_PER_NODE", kind, int) for kind in kinds)
    return _read("SLURM_GPUS_ON_NODE", environment.get("SLURM_GPUS_ON_NODE") or "0", int)


def _counts(environment: Mapping[str, str], name: str, nodes: int) -> list[int]:
    text = environment.get(name, "")
    if not text:
        return []
    counts: list[int] = _read(name, text, parse_tasks_per_node)
    if len(counts) != nodes:
        raise UsageError(
            f"Slurm's environment variables contradict one another: {name}={text!r} describes {len(counts)} nodes, and the job "
            f"has {nodes}. Leave them as they are, {_SAY_HOSTS}"
        )
    return counts


def _read(name: str, text: str, parse: Callable[[str], T]) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(
            f"environment variable {name}={text!r}: {error}. Leave it as Slurm set it, {_SAY_HOSTS}"
        ) from None
