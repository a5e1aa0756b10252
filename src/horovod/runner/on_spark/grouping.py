"""Which task of Spark becomes which rank: those of one host, or of one container of YARN, have consecutive numbers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec


class Attendance(msgspec.Struct, frozen=True):
    """What a task tells all others when it has started."""

    index: int
    """Its partition."""
    attempt: int
    """Spark's number of this start of the task, which no other task of the application has."""
    host: str
    container: str
    """The container of YARN in which its executor runs; "" outside of YARN."""
    addresses: list[str]
    """Of the host."""
    port: int
    """Where it waits for the launcher."""
    cpus: int = 1
    gpus: list[str] = []
    """Those that Spark has given to the task, as CUDA_VISIBLE_DEVICES names them."""
    earlier: list[int] = []
    """The starts of this job's tasks that this executor knows of."""


encode = msgspec.json.encode
decode = msgspec.json.Decoder(Attendance).decode


@dataclass(frozen=True)
class TaskHost:
    """The tasks of one host."""

    name: str
    tasks: Sequence[Attendance]
    """By partition."""

    @property
    def first(self) -> Attendance:
        """The task that starts the agent of the host."""
        return self.tasks[0]

    @property
    def gpus(self) -> list[str]:
        """Those of all of its tasks."""
        return list(dict.fromkeys(gpu for task in self.tasks for gpu in task.gpus))


def by_host(tasks: Iterable[Attendance]) -> list[TaskHost]:
    """The tasks by host; the first host is that of partition 0, where rank 0 is."""
    groups: dict[tuple[str, str], list[Attendance]] = {}
    for task in sorted(tasks, key=lambda task: task.index):
        groups.setdefault((task.host, task.container), []).append(task)
    return [
        TaskHost(f"{host}/{container}" if container else host, group) for (host, container), group in groups.items()
    ]


def was_started_before(tasks: Sequence[Attendance]) -> bool:
    """Whether an executor knows of tasks of this job other than these, so Spark has started it again."""
    return not {attempt for task in tasks for attempt in task.earlier} <= {task.attempt for task in tasks}
