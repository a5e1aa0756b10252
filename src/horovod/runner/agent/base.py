"""One host's part of a job, as the launcher sees it: processes that can be started, signalled and ended there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from horovod.runner.agent.messages import AgentEvent, ProcessPlan

Report = Callable[["Agent", AgentEvent], None]
"""Called with each event of an agent."""


class HostFacts(NamedTuple):
    """The facts about a host that the launcher needs before it can start ranks there."""

    python: str
    """The interpreter that the launcher, or the agent, runs with."""
    cores: int
    """The number of cores that the job may use."""
    interfaces: Sequence[str]
    """The names of its network interfaces."""
    rendezvous: tuple[str, int] | None
    """The address at which it reaches the rendezvous server; None on the launcher's host."""


class Agent(ABC):
    """An implementation reports everything that happens through the callback it was made with.

    Attributes:
        hosts: the names by which users know the host; usually one.
        facts: None until the host can start processes.
        closed: whether the agent reports no more events.
        trouble: why it was closed before :meth:`end` was called.
        unheard: whether it was closed before it confirmed that it has ended all of its processes.
    """

    def __init__(self, hosts: Collection[str]) -> None:
        self.hosts = tuple(hosts)
        self.facts: HostFacts | None = None
        self.closed = False
        self.trouble = ""
        self.unheard = False

    @property
    def name(self) -> str:
        return ", ".join(self.hosts)

    @abstractmethod
    def start(self, environment: Mapping[str, str], plans: Sequence[ProcessPlan]) -> None:
        """Start processes. Reports :class:`NotStarted` for the first that cannot be started, and leaves out the rest.

        Args:
            environment: the variables that all of them have. They hold the job's secret: never put them on a command line.
        """

    @abstractmethod
    def signal(self, number: int, processes: Collection[int]) -> None:
        """Signal these processes and what they started."""

    @abstractmethod
    def look(self) -> None:
        """Report the ends of processes that have not been reported yet, and then :class:`Stopped`."""

    @abstractmethod
    def feed(self, process: int, data: bytes) -> None:
        """Standard input for a process that does not inherit the launcher's; empty data closes it.

        Called once for each :class:`Wanted` that the agent reports.
        """

    @abstractmethod
    def end(self, grace: float, *, hunt: bool) -> None:
        """End all running processes, and report :class:`Closed`. A second call can only shorten the grace period.

        Args:
            grace: seconds between SIGTERM and SIGKILL.
            hunt: whether to look for processes of the job outside their sessions, too.
        """

    @abstractmethod
    def kill(self) -> None:
        """End everything at once, without a report. Idempotent."""
