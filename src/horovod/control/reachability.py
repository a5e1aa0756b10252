"""Finds in ``init()``, before the ranks connect, which hosts of a job reach each other.

The lowest rank of every host tries to connect to the lowest rank of every host that its own ranks will connect to, at all of
that host's addresses at once, and sends the result to all ranks (:mod:`horovod.core.lifecycle.rank_exchange`). So a firewall
between two hosts is one error with the same table on all ranks, and not a wait for a connection. Nothing is sent: the kernel of
a host that can be reached accepts by itself, because ranks listen before the rendezvous.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from horovod._base.config import NETWORK_INTERFACE
from horovod.control.mesh import Endpoint, MeshError
from horovod.control.networks import common_links

TRIAL_SECONDS = 5.0
"""How long a host may take to answer at one of its addresses: a lost packet is sent again after one and three seconds."""
_GRACE_SECONDS = 0.25
"""How much longer the other addresses of a host may take after the first has answered."""
_HOSTS_AT_ONCE = 128
"""The most simultaneous connections; they fit into the usual limit of 1024 open files."""
_LONGEST_TABLE = 20

Findings = dict[str, dict[str, str]]
"""By host: the addresses at which it did not answer, and why. Hosts that are reached well enough are left out."""


class UnreachableError(MeshError):
    """Hosts of the job cannot reach each other.

    Attributes:
        pairs: the lowest ranks of each two hosts of which the first cannot reach the second.
    """

    def __init__(self, pairs: tuple[tuple[int, int], ...], message: str) -> None:
        super().__init__(message)
        self.pairs = pairs


def find_unreachable(own: Endpoint, endpoints: Sequence[Endpoint], seconds: float) -> Findings:
    """Try the hosts that ranks of this host will connect to. Only the lowest rank of each host tries; others return ``{}``.

    Args:
        own: this rank's endpoint.
        endpoints: of all ranks, by rank.
        seconds: how long a host may take to answer.

    Returns:
        Of a host that answered at no address, all addresses; of another host, the failed addresses in networks that this host
        is in as well.
    """
    lowest = _lowest(endpoints)
    if lowest[own.host].rank != own.rank:
        return {}
    highest = max(endpoint.rank for endpoint in endpoints if endpoint.host == own.host)
    targets = [
        endpoint for host, endpoint in lowest.items() if host != own.host and endpoint.rank < highest
    ]  # the higher rank dials
    findings: Findings = {}
    for start in range(0, len(targets), _HOSTS_AT_ONCE):
        some = {endpoint.host: endpoint for endpoint in targets[start : start + _HOSTS_AT_ONCE]}
        for host, failed in _try(
            {host: (endpoint.addresses, endpoint.port) for host, endpoint in some.items()}, seconds
        ).items():
            endpoint = some[host]
            if len(failed) < len(endpoint.addresses):
                near = {link.other for link in common_links(own.networks, endpoint.networks)}
                failed = {address: why for address, why in failed.items() if address in near}
            if failed:
                findings[host] = failed
    return findings


def without_unreachable_addresses(endpoints: Sequence[Endpoint], findings: Sequence[Findings]) -> list[Endpoint]:
    """The endpoints without the addresses at which a host in the same network got no answer.

    Args:
        endpoints: of all ranks, by rank.
        findings: the results of :func:`find_unreachable`, by rank. All ranks must pass the same.

    Raises:
        UnreachableError: some host does not reach another at all; the text has a line for each pair, at most 20.
    """
    lowest = _lowest(endpoints)
    lines: list[str] = []
    pairs: list[tuple[int, int]] = []
    useless: dict[str, set[str]] = {}
    for rank, found in enumerate(findings):
        for host, failed in found.items():
            if len(failed) < len(lowest[host].addresses):
                useless.setdefault(host, set()).update(failed)
                continue
            pairs.append((rank, lowest[host].rank))
            tried = ", ".join(f"{address} ({why})" for address, why in failed.items())
            lines.append(f"  {endpoints[rank].host} cannot reach {host} at any of its addresses: {tried}")
    if lines:
        if len(lines) > _LONGEST_TABLE:
            lines[_LONGEST_TABLE:] = [f"  ... and {len(lines) - _LONGEST_TABLE} more"]
        raise UnreachableError(
            tuple(pairs),
            "Horovod initialization failed: hosts of this job cannot reach each other:\n" + "\n".join(lines) + "\n"
            "Ranks connect by TCP, at ports that the kernel chooses. Open them between these hosts, or choose other networks "
            f"with horovodrun --network-interfaces ({NETWORK_INTERFACE})",
        )
    return [endpoint.limited_to(set(endpoint.addresses) - useless.get(endpoint.host, set())) for endpoint in endpoints]


def _lowest(endpoints: Sequence[Endpoint]) -> dict[str, Endpoint]:
    found: dict[str, Endpoint] = {}
    for endpoint in endpoints:
        found.setdefault(endpoint.host, endpoint)
    return found


@dataclass
class _Attempt:
    host: str
    address: str
    connection: socket.socket


def _try(targets: Mapping[str, tuple[Sequence[str], int]], seconds: float) -> dict[str, dict[str, str]]:
    """Connect to all addresses of all hosts at once. Returns, by host, the addresses that did not answer, and why."""
    failed: dict[str, dict[str, str]] = {host: {} for host in targets}
    now = time.monotonic()
    deadlines = dict.fromkeys(targets, now + seconds)
    waiting: dict[int, _Attempt] = {}
    with selectors.DefaultSelector() as selector:

        def settle(attempt: _Attempt, error: int) -> None:
            attempt.connection.close()
            if error:
                failed[attempt.host][attempt.address] = os.strerror(error)
            else:
                deadlines[attempt.host] = min(deadlines[attempt.host], time.monotonic() + _GRACE_SECONDS)

        try:
            for host, (addresses, port) in targets.items():
                for address in addresses:
                    connection = socket.socket(
                        socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM
                    )
                    connection.setblocking(False)
                    attempt = _Attempt(host, address, connection)
                    error = connection.connect_ex((address, port))
                    if error == errno.EINPROGRESS:
                        waiting[connection.fileno()] = attempt
                        selector.register(connection, selectors.EVENT_WRITE)
                    else:
                        settle(attempt, error)
            while waiting:
                now = time.monotonic()
                for key, _ in selector.select(max(0.0, min(deadlines[each.host] for each in waiting.values()) - now)):
                    attempt = waiting.pop(key.fd)
                    selector.unregister(attempt.connection)
                    settle(attempt, attempt.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
                now = time.monotonic()
                for number, attempt in list(waiting.items()):
                    if deadlines[attempt.host] <= now:
                        del waiting[number]
                        selector.unregister(attempt.connection)
                        attempt.connection.close()
                        failed[attempt.host][attempt.address] = "no answer"
        finally:
            for attempt in waiting.values():
                attempt.connection.close()
    return {
        host: {address: failed[host][address] for address in addresses if address in failed[host]}
        for host, (addresses, _) in targets.items()
    }
