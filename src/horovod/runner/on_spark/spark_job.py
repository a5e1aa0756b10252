"""The job on Spark: its hosts are those of the tasks, which have started an agent on each."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from horovod.runner import worker_environment
from horovod.runner.agent.base import Agent, HostFacts, Report
from horovod.runner.agent.messages import Prepare
from horovod.runner.errors import LaunchError
from horovod.runner.event_loop import Loop
from horovod.runner.hosts.host_sources import HostSource
from horovod.runner.hosts.slots import HostInfo
from horovod.runner.job import Job
from horovod.runner.on_spark.grouping import Attendance, TaskHost
from horovod.runner.options import Options
from horovod.runner.reach import awaiting_agent
from horovod.runner.reach.reach import launcher_addresses
from horovod.runner.reach.remote import RemoteAgent

_SECONDS = 10.0


class _TaskHosts(HostSource):
    """Hosts with as many slots as they have tasks."""

    def __init__(self, hosts: Sequence[TaskHost]) -> None:
        self._hosts = hosts

    def hosts(self, ranks: int) -> list[HostInfo]:
        return [HostInfo(host.name, len(host.tasks)) for host in self._hosts]


class SparkJob(Job):
    """A job in the tasks of a stage. It runs in the task of partition 0. See :class:`~horovod.runner.job.Job`.

    Args:
        environment: the variables that ranks have beside those of their executor.
        hosts: where the tasks are.
        token: admits this process to the agents.
    """

    def __init__(
        self,
        options: Options,
        environment: Mapping[str, str],
        *,
        hosts_python: bool = False,
        hosts: Sequence[TaskHost],
        token: bytes,
    ) -> None:
        self._task_hosts = {host.name: host for host in hosts}
        self._token = token
        super().__init__(options, environment, hosts_python=hosts_python)

    def _choose_source(self) -> HostSource:
        return _TaskHosts(list(self._task_hosts.values()))

    def _is_here(self, host: HostInfo) -> bool:
        return False  # an agent ends the ranks of this host, too, if Spark kills this process

    def _reach_others(self, loop: Loop, report: Report, secret: str, port: int) -> list[Agent]:
        addresses = [(address, port) for address in launcher_addresses(self._options)]
        begin = Prepare(secret, "", addresses, self._seconds / 2)
        agents: list[Agent] = []
        try:
            for host in self._task_hosts.values():
                connection = reach_task(host.first, self._token)
                agents.append(RemoteAgent(host.name, loop, report, awaiting_agent.SocketConnection(connection), begin))
        except BaseException:
            for agent in agents:
                agent.kill()
            raise
        return agents

    def _shared(
        self, host: str, facts: HostFacts, here: bool, rendezvous: tuple[str, int], secret: str, ranks: int
    ) -> Mapping[str, str]:
        found = self._task_hosts[host]
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(found.gpus)} if found.gpus else {}
        threads = worker_environment.threads(self._launcher_environment, found.first.cpus, 1)
        return {**super()._shared(host, facts, here, rendezvous, secret, ranks), **threads, **gpus}

    def _torch_store(self, launcher: str) -> dict[str, str]:
        # The launcher's host is that of rank 0.
        address = launcher.partition(",")[0]
        return worker_environment.torch_store(self._launcher_environment, address, str(self._torch_port))


def reach_task(task: Attendance, token: bytes) -> socket.socket:
    """A connection to a task, which waits for it.

    Raises:
        LaunchError: it cannot be reached from here.
    """
    try:
        return awaiting_agent.connect([(address, task.port) for address in task.addresses], token, _SECONDS)
    except OSError as error:
        raise LaunchError(
            f"the task of rank 0 cannot reach that of partition {task.index} on {task.host}, at "
            f"{', '.join(task.addresses)}: {error}. Do the executors share a network? nics=[...] of horovod.spark.run names "
            "the interfaces to use"
        ) from None
