"""Hosts of ``slow_links.py``: network namespaces at one switch, whose cables have a rate, and a fixed part of a core for each.

A part of a core is a quota of the kernel's (control groups, version 1 or 2). Needs root and iproute2.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_WITH_US = ("setpriv", "--pdeathsig", "KILL")
"""Before a command: the kernel kills it when this process ends, however it does."""
_GROUPS = Path("/sys/fs/cgroup")
_PERIOD = 10_000
"""Of a quota, in microseconds: short beside a step."""
DEVICE = "eth0"
NETWORK = "10.79.0.0/24"


def address_of(host: int) -> str:
    return f"10.79.0.{host + 1}"


class LinkedHosts:
    """So many hosts, from :meth:`start` to :meth:`close`.

    Attributes:
        delays: what delays packets: "netem" of the kernel or, where it has none, a "switch" (``slow_links_delay.py``).
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.delays = "netem"
        self._switch: subprocess.Popen[bytes] | None = None
        self._sleepers: list[subprocess.Popen[bytes]] = []
        self._groups: list[Path] = []

    def start(self, slower: float = 1.0) -> None:
        """Make the hosts.

        Args:
            slower: how much slower everything is than on hosts with a whole core.
        """
        self._sleepers = [
            subprocess.Popen([*_WITH_US, "unshare", "--net", "--uts", "sleep", "infinity"])
            for _ in range(self.count + 1)
        ]
        own = os.readlink("/proc/self/ns/net")  # noqa: PTH115  no path, but a name of the kernel's
        deadline = time.monotonic() + 60
        for sleeper in self._sleepers:
            while os.readlink(f"/proc/{sleeper.pid}/ns/net") == own:  # noqa: PTH115  as above
                if time.monotonic() > deadline:
                    raise SystemExit("a network namespace did not open")
                time.sleep(0.02)
        self._inside(self.count, "ip", "link", "add", "switch", "type", "bridge")
        self._inside(self.count, "ip", "link", "set", "switch", "up")
        for host in range(self.count):
            self._inside(host, "hostname", f"host{host}")
            end = ("peer", "name", DEVICE, "netns", str(self._sleepers[host].pid))
            self._inside(self.count, "ip", "link", "add", f"port{host}", "type", "veth", *end)
            self._inside(self.count, "ip", "link", "set", f"port{host}", "master", "switch", "up")
            self._inside(host, "ip", "addr", "add", f"{address_of(host)}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                self._inside(host, "ip", "link", "set", device, "up")
            # Linux's own congestion control, whatever that of this machine is, and its least time to a retransmission.
            usual = ("congctl", "cubic", "rto_min", f"{0.2 * slower:g}s")
            self._inside(host, "ip", "route", "replace", NETWORK, "dev", DEVICE, "src", address_of(host), *usual)

    def shape(self, bits: float, latency: float) -> None:
        """Let every cable carry so many bits a second in either direction, and delay packets.

        Args:
            bits: 0 for no limit.
            latency: in seconds, of a round trip.
        """
        self._end_switch()
        for host in range(self.count):
            for inside, device in ((host, DEVICE), (self.count, f"port{host}")):
                limit = ["handle", "1:", "tbf", "rate", f"{bits:.0f}bit", "burst", "128kb", "latency", "100ms"]
                words = ("tc", "qdisc", "replace", "dev", device, "root", *(limit if bits else ["noqueue"]))
                self._inside(inside, *words)
            if latency and bits and self.delays == "netem":
                delay = ("netem", "delay", f"{latency / 2 * 1e6:.0f}us", "limit", "100000")
                words = ("tc", "qdisc", "replace", "dev", DEVICE, "parent", "1:1", *delay)
                if self._inside(host, *words, check=False):
                    self.delays = "switch"
        if latency and bits and self.delays == "switch":
            self._start_switch(latency / 2)

    def _start_switch(self, delay: float) -> None:
        """Let ``slow_links_delay.py`` pass on packets in place of the kernel's bridge."""
        ports = [f"port{host}" for host in range(self.count)]
        for name in ports:
            self._inside(self.count, "ip", "link", "set", name, "nomaster", "promisc", "on")
        command = [
            sys.executable,
            str(Path(__file__).with_name("slow_links_delay.py")),
            "--seconds",
            str(delay),
            *ports,
        ]
        inside = ["nsenter", "-t", str(self._sleepers[self.count].pid), "-n", *command]
        self._switch = subprocess.Popen([*_WITH_US, *inside], stdout=subprocess.PIPE)
        assert self._switch.stdout
        if self._switch.stdout.readline() != b"ready\n":
            raise SystemExit("the switch that delays packets has failed")

    def _end_switch(self) -> None:
        if self._kill_switch():
            for host in range(self.count):
                self._inside(self.count, "ip", "link", "set", f"port{host}", "promisc", "off", "master", "switch")

    def _kill_switch(self) -> bool:
        """Whether there was one."""
        if self._switch is None:
            return False
        self._switch.kill()
        self._switch.communicate()
        self._switch = None
        return True

    def share(self, part: float) -> str:
        """Give each host this part of a core. Returns how, or "" if this machine cannot."""
        version_1 = _GROUPS / "cpu"
        top = version_1 if version_1.is_dir() else _GROUPS
        try:
            for host in range(self.count):
                group = top / f"slow-links-{os.getpid()}-{host}"
                group.mkdir()
                self._groups.append(group)
                if top == version_1:
                    (group / "cpu.cfs_period_us").write_text(str(_PERIOD))
                    (group / "cpu.cfs_quota_us").write_text(str(int(part * _PERIOD)))
                else:
                    (group / "cpu.max").write_text(f"{int(part * _PERIOD)} {_PERIOD}")
        except OSError:
            return ""
        return "quota of a control group"

    def run(self, host: int, command: Sequence[str], env: Mapping[str, str], limited: bool) -> subprocess.Popen[str]:
        """Start a command on a host.

        Args:
            limited: whether it gets the host's part of a core, and no more.
        """
        words = ["nsenter", "-t", str(self._sleepers[host].pid), "-n", "-u", *command]
        if limited and self._groups:
            words = ["sh", "-c", f'echo $$ > {self._groups[host]}/cgroup.procs; exec "$@"', "sh", *words]
        return subprocess.Popen([*_WITH_US, *words], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def close(self) -> None:
        self._kill_switch()
        for sleeper in self._sleepers:
            sleeper.kill()
            sleeper.wait()
        for group in self._groups:
            for _ in range(50):
                with suppress(OSError):
                    group.rmdir()
                    break
                time.sleep(0.1)  # the last process of the group has not quite ended

    def _inside(self, host: int, *words: str, check: bool = True) -> int:
        command = ["nsenter", "-t", str(self._sleepers[host].pid), "-n", "-u", *words]
        return subprocess.run(command, check=check, capture_output=True).returncode
