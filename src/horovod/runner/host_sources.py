"""Where the hosts of a job come from. A new source is one small class and one line in :func:`choose`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from horovod.environments.lsf_hosts import lsf_hosts
from horovod.runner.allocation import Allocation, allocation
from horovod.runner.errors import UsageError
from horovod.runner.hosts import HostInfo, parse_host_files, parse_hosts
from horovod.runner.options import Options


class HostSource(ABC):
    """Knows the hosts that a job may use, in the order in which they are filled with ranks."""

    ranks: int | None = None
    """How many ranks there are if the user does not say; None if the user has to."""

    @abstractmethod
    def hosts(self, ranks: int) -> list[HostInfo]:
        """The hosts and their slots at this moment.

        Args:
            ranks: how many ranks there will be.

        Raises:
            ValueError: they cannot be found out; the message says why.
        """


class ThisHost(HostSource):
    """The launcher's host, with as many slots as there are ranks."""

    def hosts(self, ranks: int) -> list[HostInfo]:
        return [HostInfo("localhost", ranks)]


class HostList(HostSource):
    """``h1:2,h2:4`` on the command line."""

    def __init__(self, text: str) -> None:
        self._text = text

    def hosts(self, ranks: int) -> list[HostInfo]:
        return parse_hosts(self._text)


class HostFile(HostSource):
    """A file of lines ``h1 slots=2``."""

    def __init__(self, path: str) -> None:
        self._path = path

    def hosts(self, ranks: int) -> list[HostInfo]:
        return parse_hosts(parse_host_files(self._path))


class SlurmNodes(HostSource):
    """The nodes that Slurm has allocated to the job in which the launcher runs."""

    def __init__(self, allocated: Allocation) -> None:
        self._allocated = allocated
        self.ranks = allocated.ranks

    def hosts(self, ranks: int) -> list[HostInfo]:
        slots = self._allocated.slots(ranks)
        return [HostInfo(node, number) for node, number in zip(self._allocated.nodes, slots, strict=True) if number]


class LsfHosts(HostSource):
    """The hosts that LSF has given to the job in which the launcher runs, with its slots."""

    def __init__(self, slots: Mapping[str, int]) -> None:
        self._slots = slots
        self.ranks = sum(slots.values())

    def hosts(self, ranks: int) -> list[HostInfo]:
        return [HostInfo(name, number) for name, number in self._slots.items()]


def choose(options: Options, environment: Mapping[str, str]) -> HostSource:
    """The source that the user has asked for; else what a batch system has allocated, else this host.

    Raises:
        ValueError: the batch system's variables do not parse.
    """
    if options.hosts is not None:
        return HostList(options.hosts)
    if options.hostfile is not None:
        return HostFile(options.hostfile)
    allocated = allocation(environment)
    if allocated is not None:
        return SlurmNodes(allocated)
    try:
        given = lsf_hosts(environment)
    except ValueError as error:
        raise UsageError(f"{error}. Name the hosts with -H, as in -H hostA:2,hostB:2") from None
    return ThisHost() if given is None else LsfHosts(given)
