"""The discovery of an elastic job's hosts: the classes from which projects with their own discovery derive, and the thread that
repeats the discovery while the launcher's loop runs.
"""

from __future__ import annotations

import select
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from horovod.control.wakeup import WakeUp
from horovod.runner.event_loop import Loop
from horovod.runner.hosts.host_sources import ChangingHosts, HostScript
from horovod.runner.hosts.slots import HostInfo

PERIOD_SECONDS = 1.0

Found = Sequence[HostInfo] | str
"""The hosts that are available now, or why they are not known."""


def confirmed(before: Sequence[HostInfo], now: Sequence[HostInfo]) -> list[HostInfo]:
    """The hosts to use after two consecutive answers of the script: hosts and slots that only one of them lacks stay. Pure.

    So a host that is missing from one answer interrupts no round, and a host that is withdrawn is given up one period later.
    """
    earlier = {host.hostname: host for host in before}
    slots = {name: host.slots for name, host in earlier.items()}
    found = {host.hostname: replace(host, slots=max(host.slots, slots.get(host.hostname, 0))) for host in now}
    return list({**earlier, **found}.values())  # in the order of before


class HostDiscovery(ABC):
    """Finds the hosts that are available now."""

    @abstractmethod
    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """The slots of each host, by name."""


class HostDiscoveryScript(HostDiscovery):
    """Runs a command that prints one ``host`` or ``host:slots`` a line.

    Args:
        discovery_script: the command, for a shell.
        slots: the slots of hosts that are printed without a number.
    """

    def __init__(self, discovery_script: str, slots: int | None) -> None:
        self._script = HostScript(discovery_script, slots)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Raises ValueError if the command fails, or prints something else."""
        return {host.hostname: host.slots for host in self._script.parse(self._execute_discovery_script())}

    def _execute_discovery_script(self) -> str:
        """What the command prints. Projects override or replace it."""
        return self._script.output()


class FixedHosts(HostDiscovery):
    """Hosts that :meth:`set` changes."""

    def __init__(self, host_slots: Mapping[str, int]) -> None:
        self._host_slots = dict(host_slots)

    def set(self, host_slots: Mapping[str, int]) -> None:
        self._host_slots = dict(host_slots)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return dict(self._host_slots)


class Discovery:
    """Asks ``source`` periodically on its own thread, since it may be slow. A context manager.

    It reports new hosts and slots at once, and withdraws others once two answers in a row lack them. At the end it cancels an
    answer that is awaited, so a source that hangs does not delay the end of a job.

    Args:
        source: the host discovery script, say.
        ranks: as for :meth:`~horovod.runner.hosts.host_sources.HostSource.hosts`.
        loop: calls ``found`` on its thread.
        found: called with the hosts, or the reason why they are not known, whenever these have changed.
        first: the hosts that are known already.
    """

    def __init__(
        self, source: ChangingHosts, ranks: int, loop: Loop, found: Callable[[Found], object], first: Sequence[HostInfo]
    ) -> None:
        self._source = source
        self._ranks = ranks
        self._loop = loop
        self._found = found
        self._last: Found = list(first)
        self._answer: Sequence[HostInfo] = list(first)
        self._lock = threading.Lock()
        self._new: list[Found] = []
        self._wake_up = WakeUp()
        self._stop = WakeUp()
        self._thread = threading.Thread(target=self._poll, name="horovod-discovery", daemon=True)

    def __enter__(self) -> Discovery:
        self._loop.watch(self._wake_up.fileno(), self._pass_on)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._loop.unwatch(self._wake_up.fileno())
        self._wake_up.close()
        self._stop.close()

    def _poll(self) -> None:
        while not self._stopped(PERIOD_SECONDS):
            found: Found
            try:
                answer = self._source.hosts(self._ranks, self._stop.fileno())
                found, self._answer = confirmed(self._answer, answer), answer
            except (ValueError, OSError) as error:
                if self._stopped(0.0):
                    return
                found = str(error)
            if found != self._last:
                self._last = found
                with self._lock:
                    self._new.append(found)
                self._wake_up.set()

    def _stopped(self, seconds: float) -> bool:
        """Whether this discovery must end; waits for ``seconds`` at most."""
        poll = select.poll()  # select() takes no descriptor above 1023
        poll.register(self._stop, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def _pass_on(self) -> None:
        self._wake_up.clear()
        with self._lock:
            new, self._new = self._new, []
        for found in new:
            self._found(found)
