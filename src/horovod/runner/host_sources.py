"""Where the hosts of a job come from. A new source is one small class and one line in :func:`choose`."""

from __future__ import annotations

from abc import ABC, abstractmethod

from horovod.runner.hosts import HostInfo, parse_host_files, parse_hosts
from horovod.runner.options import Options


class HostSource(ABC):
    """Knows the hosts that a job may use, in the order in which they are filled with ranks."""

    @abstractmethod
    def hosts(self) -> list[HostInfo]:
        """The hosts and their slots at this moment.

        Raises:
            ValueError: they cannot be found out; the message says why.
        """


class ThisHost(HostSource):
    """The launcher's host, with as many slots as there are ranks."""

    def __init__(self, slots: int) -> None:
        self._slots = slots

    def hosts(self) -> list[HostInfo]:
        return [HostInfo("localhost", self._slots)]


class HostList(HostSource):
    """``h1:2,h2:4`` on the command line."""

    def __init__(self, text: str) -> None:
        self._text = text

    def hosts(self) -> list[HostInfo]:
        return parse_hosts(self._text)


class HostFile(HostSource):
    """A file of lines ``h1 slots=2``."""

    def __init__(self, path: str) -> None:
        self._path = path

    def hosts(self) -> list[HostInfo]:
        return parse_hosts(parse_host_files(self._path))


def choose(options: Options, ranks: int) -> HostSource:
    """The source that the user has asked for."""
    if options.hosts is not None:
        return HostList(options.hosts)
    if options.hostfile is not None:
        return HostFile(options.hostfile)
    return ThisHost(ranks)
