"""Hosts, their slots, and which rank runs on which host. Pure: nothing is looked up on a network."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from horovod.runner.errors import UsageError

MOST_RANKS = 1 << 16
"""A larger number of ranks, or of slots of a host, is a typing error, and would fill the memory before it is reported."""
_HOST = re.compile(r"(?:([\w.-]+)@)?([\w.-]+):([0-9]{1,32})")


@dataclass(frozen=True)
class HostInfo:
    """A host and how many ranks may run on it."""

    hostname: str
    slots: int
    user: str = ""
    """The user to log in as; "" leaves it to ssh."""
    machine: str = ""
    """The machine that this host is a part of, with others whose ranks are local to this one's; "" if it is a whole machine."""
    first_slot: int = 0
    """The number that the first slot has on the machine."""

    @property
    def login(self) -> str:
        """The host in the form that ssh takes."""
        return f"{self.user}@{self.hostname}" if self.user else self.hostname

    @staticmethod
    def from_string(text: str) -> HostInfo:
        """Parse ``host:slots`` or ``user@host:slots``.

        Raises:
            ValueError: the text has another form, or no slots.
        """
        match = _HOST.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"invalid host {text.strip()!r}: please write hosts as worker-0:2,worker-1:2")
        if int(match[3]) == 0:
            raise UsageError(f"invalid host {text.strip()!r}: a host needs at least one slot, as in {match[2]}:1")
        if int(match[3]) > MOST_RANKS:
            raise UsageError(f"invalid host {text.strip()!r}: a host has at most {MOST_RANKS} slots")
        return HostInfo(match[2], int(match[3]), match[1] or "")


@dataclass(frozen=True)
class SlotInfo:
    """One rank's assignment: its host, and its global, local and cross rank and size."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int

    def to_response_string(self) -> str:
        """The numbers as ``rank,size,local_rank,local_size,cross_rank,cross_size``."""
        numbers = (self.rank, self.size, self.local_rank, self.local_size, self.cross_rank, self.cross_size)
        return ",".join(map(str, numbers))


INVALID_SLOT_INFO = SlotInfo(
    hostname="", rank=-1, local_rank=-1, cross_rank=-1, size=-1, local_size=-1, cross_size=-1
)  # fmt: skip
"""The assignment of a process without a rank."""


def parse_hosts(hosts_string: str) -> list[HostInfo]:
    """Parse ``h1:2,h2:4``. A host named twice has the sum of its slots, at its first position.

    Raises:
        ValueError: a host does not parse, the message quotes it; or it is named with different users.
    """
    found: dict[str, HostInfo] = {}
    for host in map(HostInfo.from_string, hosts_string.split(",")):
        first = found.setdefault(host.hostname, replace(host, slots=0))
        if first.user != host.user:
            raise UsageError(f"host {host.hostname} is named with different users: {first.login} and {host.login}")
        found[host.hostname] = replace(first, slots=first.slots + host.slots)
    return list(found.values())


def parse_host_files(filename: str | Path) -> str:
    """Read a hostfile, one ``<host> slots=<n>`` or ``<host>:<n>`` per line. Returns ``h1:2,h2:4``.

    Blank lines and what follows a ``#`` are skipped.

    Raises:
        ValueError: the file cannot be read, or a line does not parse; the message names file and line.
    """
    try:
        lines = Path(filename).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"cannot read the hostfile {filename}: {reason}") from None
    hosts: list[str] = []
    for number, line in enumerate(lines, start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = re.fullmatch(r"((?:[\w.-]+@)?[\w.-]+)(?:\s+slots\s*=\s*|:)([0-9]+)", content)
        if match is None:
            raise UsageError(f"{filename}, line {number}: {content!r} is not of the form `worker-0 slots=2`")
        if int(match[2]) == 0:
            raise UsageError(
                f"{filename}, line {number}: {content!r}: a host needs at least one slot; leave out the line"
            )
        hosts.append(f"{match[1]}:{match[2]}")
    if not hosts:
        raise UsageError(f"the hostfile {filename} names no host")
    return ",".join(hosts)


def get_host_assignments(
    hosts: Sequence[HostInfo], min_num_proc: int, max_num_proc: int | None = None
) -> list[SlotInfo]:
    """Give ranks to slots: hosts in their order, each filled before the next.

    Args:
        hosts: where ranks may run.
        min_num_proc: how many ranks there must be.
        max_num_proc: how many there may be; None takes every slot.

    Returns:
        The assignments by rank. A cross rank counts the earlier hosts with the same local rank.

    Raises:
        ValueError: there are fewer slots than ``min_num_proc``.
    """
    available = sum(host.slots for host in hosts)
    if available < min_num_proc:
        raise UsageError(
            f"Requested more processes ({min_num_proc}) than there are available slots ({available}): "
            "name more hosts or slots with -H, as in -H localhost:4"
        )
    size = available if max_num_proc is None else min(available, max_num_proc)
    names = [host.hostname for host in hosts for _ in range(host.slots)]
    return number_ranks(names[:size])


def number_ranks(hostnames: Sequence[str]) -> list[SlotInfo]:
    """Number ranks: the assignments by rank. A cross rank counts the earlier hosts with the same local rank.

    Args:
        hostnames: the host of each rank.
    """
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(hostnames):
        ranks.setdefault(name, []).append(rank)
    assignments: dict[int, SlotInfo] = {}
    for local_rank in range(max(map(len, ranks.values()), default=0)):
        peers = [name for name, of_host in ranks.items() if len(of_host) > local_rank]
        for cross_rank, name in enumerate(peers):
            rank = ranks[name][local_rank]
            assignments[rank] = SlotInfo(
                hostname=name,
                rank=rank,
                local_rank=local_rank,
                cross_rank=cross_rank,
                size=len(hostnames),
                local_size=len(ranks[name]),
                cross_size=len(peers),
            )
    return [assignments[rank] for rank in range(len(hostnames))]
