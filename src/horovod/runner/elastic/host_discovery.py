"""Where the hosts of an elastic job come from, under the names that projects with a discovery of their own derive from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from horovod.runner.hosts.host_sources import HostScript


class HostDiscovery(ABC):
    """Finds the hosts that are available now."""

    @abstractmethod
    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """The slots of each host, by name."""


class HostDiscoveryScript(HostDiscovery):
    """Runs a command that prints one ``host`` or ``host:slots`` a line.

    Args:
        discovery_script: the command, for a shell.
        slots: of hosts that are printed without.
    """

    def __init__(self, discovery_script: str, slots: int | None) -> None:
        self._script = HostScript(discovery_script, slots)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Raises RuntimeError if the command fails, and ValueError if it prints something else."""
        return {host.hostname: host.slots for host in self._script.hosts(0)}


class FixedHosts(HostDiscovery):
    """Hosts that :meth:`set` changes."""

    def __init__(self, host_slots: Mapping[str, int]) -> None:
        self._host_slots = dict(host_slots)

    def set(self, host_slots: Mapping[str, int]) -> None:
        self._host_slots = dict(host_slots)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return dict(self._host_slots)
