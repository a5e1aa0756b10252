"""The sources of a job's hosts. A new source is one small class and one line in :func:`choose`."""

from __future__ import annotations

import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping
from shlex import quote

from horovod.environments.lsf_hosts import lsf_hosts
from horovod.runner import children
from horovod.runner.errors import UsageError
from horovod.runner.hosts import mpi_operator
from horovod.runner.hosts.slots import MOST_RANKS, HostInfo, parse_host_files, parse_hosts
from horovod.runner.hosts.slurm_allocation import Allocation, allocation
from horovod.runner.options import Options


class HostSource(ABC):
    """A source of the hosts that a job may use, in the order in which they get ranks."""

    ranks: int | None = None
    """The number of ranks if the user does not give one; None if the user must give one."""

    @abstractmethod
    def hosts(self, ranks: int) -> list[HostInfo]:
        """The hosts and their slots at this moment.

        Args:
            ranks: how many ranks there will be.

        Raises:
            ValueError: the hosts are not known; the message says why.
        """


class ThisHost(HostSource):
    """The launcher's host, with as many slots as there are ranks."""

    def hosts(self, ranks: int) -> list[HostInfo]:
        return [HostInfo("localhost", ranks)]


class HostArgument(HostSource):
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


def _capture(command: str, seconds: float, cancel: int = -1) -> str:
    """The standard output of the host discovery script. None of its processes is left.

    Args:
        command: for a shell.
        seconds: how long the script may take.
        cancel: a descriptor; once that is readable, the script is ended, and ValueError is raised. -1 for none.

    Raises:
        ValueError: the script fails, takes longer than ``seconds``, writes more than a MiB, or writes something other than
            UTF-8 text. If it fails, the message quotes the end of its standard error.
    """
    script = f"the host discovery script {command!r}"
    try:
        status, out, errors = children.run(["/bin/sh", "-c", command], seconds, cancel=cancel)
    except children.Cancelled:
        raise UsageError(f"{script} was ended, because the job ends") from None
    except children.TooMuchOutput:
        raise UsageError(f"{script} wrote more than {children.MOST_BYTES} bytes") from None
    except TimeoutError:
        raise UsageError(f"{script} did not end within {seconds:g} seconds") from None
    if status:
        ending = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
        said = errors.decode("utf-8", "replace").strip().splitlines()
        raise UsageError(f"{script} {ending}" + (f": {said[-1]}" if said else "; try it by hand"))
    try:
        return out.decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{script} wrote something other than UTF-8 text") from None


class ChangingHosts(HostSource):
    """A source whose hosts come and go while an elastic job runs."""

    @abstractmethod
    def hosts(self, ranks: int, cancel: int = -1) -> list[HostInfo]:
        """As :meth:`HostSource.hosts`; gives up once the descriptor ``cancel`` is readable."""


class HostScript(ChangingHosts):
    """A command that prints the hosts that are available now, one ``h1`` or ``h1:2`` per line.

    A host with no slots (``h1:0``) is left out. If a host is printed twice, the last line counts.

    Args:
        command: for a shell, or the path of a script, which may have spaces.
        slots: the slots of hosts that are printed without a number; None if every host must have a number.
        seconds: how long the command may take.
    """

    def __init__(self, command: str, slots: int | None = None, seconds: float = 30.0) -> None:
        self._command = command
        self._slots = slots
        self._seconds = seconds

    def hosts(self, ranks: int, cancel: int = -1) -> list[HostInfo]:
        return self.parse(self.output(cancel))

    def output(self, cancel: int = -1) -> str:
        """What the command prints. Raises as :meth:`hosts`."""
        is_path = os.path.isfile(self._command)  # noqa: PTH113  which raises where a command is too long for a path
        return _capture(quote(self._command) if is_path else self._command, self._seconds, cancel)

    def parse(self, output: str) -> list[HostInfo]:
        """The hosts in what the command has printed.

        Raises:
            ValueError: a line is of another form.
        """
        found: dict[str, HostInfo] = {}
        for line in map(str.strip, output.splitlines()):
            if not line:
                continue
            name, colon, slots = line.rpartition(":")
            if not colon:
                if self._slots is None:
                    raise UsageError(
                        f"the host discovery script {self._command!r} printed {line!r} without slots: print {line}:2, or say "
                        "with --slots-per-host how many slots such hosts have"
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
                    f"host:2 with at most {MOST_RANKS} slots"
                ) from None
            found[host.hostname] = host
        return list(found.values())


def choose(options: Options, environment: Mapping[str, str]) -> HostSource:
    """The source that the user has asked for; else what a batch system has allocated, else this host.

    Raises:
        ValueError: the batch system's variables do not parse.
    """
    if options.host_discovery_script is not None:
        return HostScript(options.host_discovery_script, options.slots)
    if options.hosts is not None:
        return HostArgument(options.hosts)
    if options.hostfile is not None:
        return HostFile(options.hostfile)
    allocated = allocation(environment)
    if allocated is not None:
        return SlurmNodes(allocated)
    try:
        given = lsf_hosts(environment)
    except ValueError as error:
        raise UsageError(f"{error}. Name the hosts with -H, as in -H hostA:2,hostB:2") from None
    if given is not None:
        return LsfHosts(given)
    path = mpi_operator.host_file(environment)
    return ThisHost() if path is None else HostFile(path)
