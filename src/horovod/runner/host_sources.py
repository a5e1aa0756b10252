"""Where the hosts of a job come from. A new source is one small class and one line in :func:`choose`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from horovod.runner import mpi_operator
from horovod.runner.captured import capture
from horovod.runner.errors import UsageError
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


class HostScript(HostSource):
    """A command that prints the hosts of the moment, one ``h1`` or ``h1:2`` a line.

    A host without slots left (``h1:0``) is none of them; of a host that is printed twice the last line counts.

    Args:
        command: for a shell.
        slots: of hosts that name none; None if each has to name its own.
        seconds: how long the command may take.
    """

    def __init__(self, command: str, slots: int | None = None, seconds: float = 30.0) -> None:
        self._command = command
        self._slots = slots
        self._seconds = seconds

    def hosts(self) -> list[HostInfo]:
        found: dict[str, HostInfo] = {}
        for line in map(str.strip, capture(self._command, self._seconds).splitlines()):
            if not line:
                continue
            name, colon, slots = line.rpartition(":")
            if not colon:
                if self._slots is None:
                    raise UsageError(
                        f"the host discovery script {self._command!r} printed {line!r} without slots: print {line}:2, or say "
                        "with --slots-per-host how many hosts have that name none"
                    )
                line = f"{line}:{self._slots}"
            elif slots.strip("0") == "" and slots:
                found.pop(name.rpartition("@")[2], None)
                continue
            try:
                host = HostInfo.from_string(line)
            except ValueError:
                raise UsageError(
                    f"the host discovery script {self._command!r} printed {line[:200]!r}, which is not of the form host or "
                    "host:2"
                ) from None
            found[host.hostname] = host
        return list(found.values())


def choose(options: Options, ranks: int, environment: Mapping[str, str]) -> HostSource:
    """The source that the user has asked for, or else the one that the launcher's surroundings provide."""
    if options.hosts is not None:
        return HostList(options.hosts)
    if options.hostfile is not None:
        return HostFile(options.hostfile)
    path = mpi_operator.host_file(environment)
    return ThisHost(ranks) if path is None else HostFile(path)
