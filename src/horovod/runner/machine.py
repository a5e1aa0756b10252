"""This machine: which host names are its own, and how many cores a job may use."""

from __future__ import annotations

import ipaddress
import math
import os
import random
import socket
from pathlib import Path


def is_local(hostname: str) -> bool:
    """Whether ``hostname`` names this machine. Asks the resolver only if the name itself does not tell.

    Raises:
        OSError: the name does not resolve.
    """
    own = socket.gethostname()
    if hostname in {"localhost", own, own.partition(".")[0]} or _is_loopback(hostname):
        return True
    addresses = {entry[4][0] for entry in socket.getaddrinfo(hostname, None, type=socket.SOCK_DGRAM)}
    return any(_is_own_address(str(address)) for address in addresses)


def port_below_ephemeral() -> int:
    """A free port of this machine, outside the range from which the kernel gives ports to processes that ask for any.

    Raises:
        OSError: 100 ports were tried, and none is free.
    """
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
            return port
    raise OSError("100 ports are all in use")


def _is_loopback(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:
        return False


def _is_own_address(address: str) -> bool:
    # The kernel lets a socket be bound to the addresses of its own interfaces and to no other.
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def usable_cores(control_groups: Path = Path("/sys/fs/cgroup")) -> int:
    """The number of cores that this process may use: those of its affinity mask, but no more than the quota in
    ``control_groups``, rounded up."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # no affinity on this operating system
        cores = os.cpu_count() or 1
    quota = _quota(control_groups)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def _quota(root: Path) -> float | None:
    """The CPU time that the container may use, in cores; None if there is no limit, or it cannot be read."""
    try:
        limit, period = (root / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        pass
    try:
        limit = (root / "cpu" / "cpu.cfs_quota_us").read_text()
        period = (root / "cpu" / "cpu.cfs_period_us").read_text()
        return None if int(limit) <= 0 else int(limit) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
