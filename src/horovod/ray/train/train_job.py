"""The launcher of an elastic job in Ray Train. Its hosts are Ray's workers: each is a rank, and brings an agent."""

from __future__ import annotations

import itertools
import socket
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from horovod.ray.train.in_worker import WorkerPlace
from horovod.runner import worker_environment
from horovod.runner.agent.base import Agent, HostFacts, Report
from horovod.runner.agent.messages import Prepare
from horovod.runner.elastic.elastic_job import ElasticJob
from horovod.runner.errors import LaunchError
from horovod.runner.event_loop import Loop
from horovod.runner.hosts.host_sources import ChangingHosts, HostSource
from horovod.runner.hosts.slots import HostInfo
from horovod.runner.options import Options
from horovod.runner.output.outcome import Outcome
from horovod.runner.output.output import StreamSink
from horovod.runner.reach.awaiting_agent import SocketConnection
from horovod.runner.reach.reach import launcher_addresses
from horovod.runner.reach.remote import RemoteAgent


class JoiningWorker(NamedTuple):
    """A worker that waits for the launcher."""

    place: WorkerPlace
    connection: socket.socket


class JoiningWorkers(ChangingHosts):
    """The workers that have come. Any thread may add some."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hosts: dict[str, HostInfo] = {}
        self._connections: dict[str, socket.socket] = {}
        self._closed = False

    def add(self, members: Iterable[JoiningWorker]) -> None:
        with self._lock:
            for place, connection in members:
                name = self._name(place)
                self._hosts[name] = HostInfo(name, 1, machine=place.node, first_slot=place.number)
                self._connections[name] = connection
        if self._closed:
            self.close()

    def hosts(self, ranks: int, cancel: int = -1) -> list[HostInfo]:
        with self._lock:
            return list(self._hosts.values())

    def take(self, name: str) -> socket.socket:
        """The connection to a worker, which belongs to the caller.

        Raises:
            LaunchError: it was taken before.
        """
        with self._lock:
            connection = self._connections.pop(name, None)
        if connection is None:
            raise LaunchError(f"{name} has been a rank already")
        return connection

    def close(self) -> None:
        """Close the connections that nobody has taken, also later: those workers learn that the job has ended."""
        with self._lock:
            self._closed = True
            left, self._connections = list(self._connections.values()), {}
        for connection in left:
            connection.close()

    def _name(self, place: WorkerPlace) -> str:
        """A name for users, which no other worker has, also not the one that this one replaces."""
        first = f"{place.host}, Ray's worker {place.number}"
        names = itertools.chain([first], (f"{first}, replacement {number}" for number in itertools.count(1)))
        return next(name for name in names if name not in self._hosts)


class TrainJob(ElasticJob):
    """See :class:`ElasticJob`."""

    attached: ClassVar[bool] = True

    def __init__(self, options: Options, members: JoiningWorkers) -> None:
        self._members = members
        self._newest: dict[int, Agent] = {}  # by Ray's number of the worker
        super().__init__(options, {})

    def _find_source(self, options: Options, environment: Mapping[str, str]) -> HostSource:
        return self._members

    def _is_here(self, host: HostInfo) -> bool:
        return False  # each rank brings its agent

    def _reach(self, host: HostInfo, loop: Loop, report: Report, secret: str, port: int) -> Agent:
        addresses = [(address, port) for address in launcher_addresses(self._options)]
        begin = Prepare(secret, "", addresses, self._seconds / 2)
        connection = SocketConnection(self._members.take(host.hostname))
        agent = self._newest[host.first_slot] = RemoteAgent(host.hostname, loop, report, connection, begin)
        return agent

    def lost(self) -> list[int]:
        """Ray's numbers of the workers whose connections have ended. Any thread may call it."""
        return [number for number, agent in list(self._newest.items()) if agent.closed and agent.unheard]

    def _shared(
        self, host: str, facts: HostFacts, here: bool, rendezvous: tuple[str, int], secret: str, ranks: int
    ) -> Mapping[str, str]:
        # Ray has given the process its environment.
        return {
            **worker_environment.interfaces_of_host(self._options.nics, facts.interfaces, host),
            **self._recorder_variables(),
            **worker_environment.rendezvous_point(rendezvous, secret),
        }


class RunningJob:
    """A job on a thread of this process, which ends with its ranks.

    Args:
        settings: with ``min_workers``, ``reset_limit``, ``elastic_timeout`` and ``nics``.
        members: all workers of the first round.
    """

    def __init__(self, settings: Any, members: Sequence[JoiningWorker]) -> None:
        self._members = JoiningWorkers()
        self._members.add(members)
        options = Options(
            command=(sys.executable,),  # for ranks that a launcher starts; these run already
            num_proc=len(members),
            min_num_proc=min(settings.min_workers, len(members)),
            max_num_proc=len(members),
            reset_limit=settings.reset_limit,
            elastic_timeout=settings.elastic_timeout,
            nics=tuple(settings.nics or ()),
        )
        self._job = TrainJob(options, self._members)
        self._outcome: Outcome | None = None
        self._thread = threading.Thread(target=self._run, name="horovod-launcher", daemon=True)
        self._thread.start()

    @property
    def ended_well(self) -> bool:
        """Whether all ranks of the last round have returned."""
        return self._outcome is not None and not self._outcome.failed

    def lost(self) -> list[int]:
        """Ray's numbers of the workers that have ended, and have not been replaced."""
        return self._job.lost()

    def add(self, members: Iterable[JoiningWorker]) -> None:
        """Let workers join. If the job has ended, they learn that."""
        self._members.add(members)

    def _run(self) -> None:
        stderr = StreamSink(sys.stderr)
        try:
            self._outcome = outcome = self._job.run(StreamSink(sys.stdout), stderr)
            for text in (outcome.describe(), self._job.recorder_notice(outcome)):
                if text:
                    stderr.show("", [f"{text}\n"])
        except (LaunchError, ValueError) as error:
            stderr.show("", [f"horovodrun: {error}\n"])
        except Exception:
            stderr.show("", [f"horovodrun: the launcher has failed\n{traceback.format_exc()}"])
        finally:
            self._members.close()
