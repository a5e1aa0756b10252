"""Hosts on one machine: namespaces of network, name, mounts, processes and IPC, joined by virtual switches, an sshd in each.

They share the file system, so the same Python, the same Horovod and the same script are everywhere. Interface names differ on
purpose. A second network between them is there on demand. Needs root, iproute2 and openssh-server.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from time_limits import SOON

LIMIT_SECONDS = SOON
ADDRESSES = {"hostA": "10.77.0.1", "hostB": "10.77.0.2", "hostC": "10.77.0.3"}
INTERFACES = {"hostA": "ethA", "hostB": "fabricB0", "hostC": "lanC"}
SECOND = {"hostA": "railA", "hostB": "railB1", "hostC": "railC"}
"""Interfaces in the second network, 10.78.0.0/24."""
_SWITCHES = {"switch1": INTERFACES, "switch2": SECOND}
_SSHD = "/usr/sbin/sshd"
_WITH_US = ("setpriv", "--pdeathsig", "KILL")
"""Before a command: the kernel kills it when this process ends, however it does. All in its namespaces goes with it."""

_INIT = """
hostname {name}
mount -t tmpfs tmpfs /dev/shm
mount --bind {folder}/hosts /etc/hosts
ip link set lo up
mkdir -p /run/sshd
exec {sshd} -D -f {folder}/{name}.conf -E {folder}/{name}.log
"""
_SSHD_CONFIG = """
Port 22
HostKey {folder}/key_{name}
AuthorizedKeysFile {folder}/id.pub
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile none
SetEnv TMPDIR={temporary}/{name}
"""
_SSH_CONFIG = """
Host *
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known
"""
_KEY = "  IdentityFile {folder}/id\n"


def obstacle() -> str:
    """Why there can be no such hosts on this machine, or ""."""
    if os.getuid():
        return "needs root, for namespaces of network, mounts and processes"
    missing = [
        tool
        for tool in ("ip", "ssh", "ssh-keygen", "setpriv", "unshare", "nsenter", _SSHD)
        if shutil.which(tool) is None
    ]
    if missing:
        return f"needs {', '.join(missing)}: apt-get install iproute2 openssh-server"
    done = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True)
    return f"this machine allows no namespaces: {done.stderr.strip()}" if done.returncode else ""


@contextmanager
def without_blanks(folder: Path) -> Iterator[Path]:
    """This folder, or another one where its path has blanks, which Slurm's configuration cannot name."""
    if len(str(folder).split()) == 1:
        yield folder
    else:
        with tempfile.TemporaryDirectory(prefix="hvd-hosts-", dir="/tmp") as other:
            yield Path(other)


@dataclass
class Hosts:
    """All hosts, from :meth:`start` to :meth:`close`."""

    folder: Path
    init: dict[str, int] = field(default_factory=dict)
    """The first process of each, which listens for ssh."""
    cut: bool = False
    """Whether a cable has been pulled out: sshd keeps a connection that is silent, until the kernel gives it up."""
    _outer: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _room: int = 0
    """The process in whose network the switches stand."""

    def start(self) -> None:
        self._write("hosts", "127.0.0.1 localhost\n" + "".join(f"{ip} {name}\n" for name, ip in ADDRESSES.items()))
        self._write("ssh_config", (_SSH_CONFIG + _KEY).format(folder=self.folder))
        self._write("keyless_config", _SSH_CONFIG.format(folder=self.folder))
        for key in ("id", "other_id", *(f"key_{name}" for name in ADDRESSES)):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / key], check=True)
        # Launchers that are killed leave files there whose names have process ids, which are the same on other hosts.
        temporary = Path(tempfile.gettempdir())
        for name in ADDRESSES:
            (temporary / name).mkdir(exist_ok=True)
            self._write(f"{name}.conf", _SSHD_CONFIG.format(folder=self.folder, name=name, temporary=temporary))
            script = _INIT.format(folder=self.folder, name=name, sshd=_SSHD)
            options = ["--net", "--uts", "--mount", "--pid", "--ipc", "--fork", "--mount-proc", "--kill-child"]
            null = subprocess.DEVNULL
            outer = subprocess.Popen(
                [*_WITH_US, "unshare", *options, "sh", "-ec", script],
                stdin=null, stdout=null, stderr=null, start_new_session=True,
            )  # fmt: skip
            self._outer.append(outer)
            self.init[name] = self._await_child(outer)
        self._lay_cables()
        self._await_sshd()

    def _lay_cables(self) -> None:
        null = subprocess.DEVNULL
        command = [*_WITH_US, "unshare", "--net", "sleep", "infinity"]
        room = subprocess.Popen(command, stdin=null, stdout=null, stderr=null)
        self._outer.append(room)
        deadline = time.monotonic() + LIMIT_SECONDS
        while psutil.Process(room.pid).name() != "sleep":
            assert time.monotonic() < deadline, "the room of the switches did not open"
            time.sleep(0.02)
        self._room = room.pid
        for switch, interfaces in _SWITCHES.items():
            self._ip("link", "add", switch, "type", "bridge", inside=self._room)
            self._ip("link", "set", switch, "up", inside=self._room)
            for name, interface in interfaces.items():
                end = ("peer", "name", interface, "netns", str(self.init[name]))
                self._ip("link", "add", f"{switch}-{name}", "type", "veth", *end, inside=self._room)
                self._ip("link", "set", f"{switch}-{name}", "master", switch, "up", inside=self._room)
        for name in ADDRESSES:
            self._ip("addr", "add", f"{ADDRESSES[name]}/24", "dev", INTERFACES[name], inside=self.init[name])
            self.link(name, up=True)

    def on(self, name: str, *command: str | Path, folder: Path = Path("/")) -> list[str]:
        """The words that run a command on a host, in ``folder``."""
        return ["nsenter", "-t", str(self.init[name]), "-a", "-r", f"--wd={folder}", *map(str, command)]

    def link(self, name: str, *, up: bool) -> None:
        """Plug a host's cable in, or pull it out: neither side gets any message of that."""
        self.cut = self.cut or not up
        self._ip("link", "set", INTERFACES[name], "up" if up else "down", inside=self.init[name])

    def second_network(self, *names: str, up: bool) -> None:
        """Join hosts to the second network, or take them out."""
        for name in names:
            address = ADDRESSES[name].replace("10.77.", "10.78.")
            self._ip(
                "addr",
                "replace" if up else "flush",
                *([f"{address}/24"] if up else []),
                "dev",
                SECOND[name],
                inside=self.init[name],
            )
            self._ip("link", "set", SECOND[name], "up" if up else "down", inside=self.init[name])
            self._ip("link", "set", f"switch2-{name}", "master", "switch2", inside=self._room)

    @contextmanager
    def only_ipv6(self, *names: str, also_named: bool) -> Iterator[None]:
        """Hosts have no IPv4 address, and their names resolve to IPv6 addresses, ``also_named``: and to their former ones."""
        table = (self.folder / "hosts").read_text()
        sixth = {name: ADDRESSES[name].replace("10.77.0.", "fd77::") for name in names}
        kept = table if also_named else "127.0.0.1 localhost\n"
        for name in names:
            device = ("dev", INTERFACES[name])
            self._ip("-6", "addr", "add", f"{sixth[name]}/64", *device, "nodad", inside=self.init[name])
            self._ip("-4", "addr", "flush", *device, inside=self.init[name])
        self._write("hosts", kept + "".join(f"{address} {name}\n" for name, address in sixth.items()))
        try:
            yield
        finally:
            self._write("hosts", table)
            for name in names:
                device = ("dev", INTERFACES[name])
                self._ip("-6", "addr", "del", f"{sixth[name]}/64", *device, inside=self.init[name])
                self._ip("addr", "add", f"{ADDRESSES[name]}/24", *device, inside=self.init[name])

    def unplug_second(self, name: str) -> None:
        """Pull a host's cable out of the second switch, of which its interface notices nothing."""
        self._ip("link", "set", f"switch2-{name}", "nomaster", inside=self._room)

    @contextmanager
    def broken_second_network(self) -> Iterator[None]:
        """hostA and hostB are in the second network, where nothing of hostB's arrives."""
        self.second_network("hostA", "hostB", up=True)
        self.unplug_second("hostB")
        try:
            yield
        finally:
            self.second_network("hostA", "hostB", up=False)

    @contextmanager
    def no_way(self, name: str, other: str) -> Iterator[None]:
        """What ``name`` sends ``other`` is lost, also its answers, as at a firewall."""
        neighbour = ("neigh", "replace", ADDRESSES[other], "lladdr", "00:00:00:00:00:01", "dev", INTERFACES[name])
        self._ip(*neighbour, "nud", "permanent", inside=self.init[name])
        try:
            yield
        finally:
            self._ip("neigh", "del", ADDRESSES[other], "dev", INTERFACES[name], inside=self.init[name])

    @contextmanager
    def replaced(self, name: str, path: Path, other: Path) -> Iterator[None]:
        """A host has another file at this path."""
        subprocess.run(self.on(name, "mount", "--bind", other, path), check=True, capture_output=True)
        try:
            yield
        finally:
            subprocess.run(self.on(name, "umount", path), check=True, capture_output=True)

    def received(self, name: str, interface: str) -> int:
        """How many bytes have come to a host by one of its interfaces."""
        for line in Path(f"/proc/{self.init[name]}/net/dev").read_text().splitlines():
            found, _, counts = line.partition(":")
            if found.strip() == interface:
                return int(counts.split()[0])
        raise AssertionError(f"{name} has no interface {interface}")

    def shape(self, rate: str) -> None:
        """Let every cable carry no more than ``rate`` in either direction, as in "1gbit"; "" for no limit."""
        for switch, interfaces in _SWITCHES.items():
            for name, interface in interfaces.items():
                for inside, device in ((self.init[name], interface), (self._room, f"{switch}-{name}")):
                    kind = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"] if rate else ["noqueue"]
                    _inside(inside, "tc", "qdisc", "replace", "dev", device, "root", *kind)

    def processes(self, name: str) -> dict[int, str]:
        """What runs on a host beside its sshd: process ids of this machine, and command lines."""
        found: dict[int, str] = {}
        own = os.readlink(f"/proc/{self.init[name]}/ns/pid")  # noqa: PTH115  no path, but a name of the kernel's
        for process in psutil.process_iter():
            try:
                if process.pid == self.init[name] or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if os.readlink(f"/proc/{process.pid}/ns/pid") == own:  # noqa: PTH115  as above
                    found[process.pid] = " ".join(process.cmdline())
            except (OSError, psutil.Error):
                pass
        return found

    def find(self, name: str, text: str) -> list[int]:
        """Processes of a host with ``text`` in their command lines."""
        return sorted(pid for pid, line in self.processes(name).items() if text in line)

    def agents(self, name: str) -> list[int]:
        """The launcher's agent on a host, without the shell that started it."""
        found = self.processes(name).items()
        return sorted(pid for pid, line in found if "agent.program" in line and "/bin/sh" not in line)

    def await_nothing(self, seconds: float) -> None:
        """Fail unless everything ends on all hosts within ``seconds``."""
        deadline = time.monotonic() + seconds
        while left := self.left():
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.1)

    def left(self, start: str = "") -> list[str]:
        """Processes on all hosts, of those whose command lines begin with ``start``."""
        left = []
        for name in ADDRESSES:
            for pid, line in self.processes(name).items():
                if self.cut and line.startswith("sshd: "):
                    continue  # it may wait for a host that is gone
                if line.startswith(start):
                    left.append(f"{name}: {pid} {line}")
        return left

    def mend(self) -> None:
        """Plug all cables in, and end what is left, such as an sshd that waits for a host that is gone."""
        self.second_network(*self.init, up=False)
        for name in self.init:
            self.link(name, up=True)
            for pid in self.processes(name):
                with suppress(psutil.NoSuchProcess):
                    psutil.Process(pid).kill()
        self.cut = False

    def listening(self, name: str) -> list[tuple[str, int]]:
        """Addresses and ports at which something on a host can be reached, beside its sshd."""
        found: list[tuple[str, int]] = []
        for line in Path(f"/proc/{self.init[name]}/net/tcp").read_text().splitlines()[1:]:
            _, local, _, state = line.split()[:4]
            port = int(local.partition(":")[2], 16)
            if state == "0A" and port != 22:
                found.append((ADDRESSES[name], port))
        return found

    def close(self) -> None:
        for name in self.init:
            for pid in self.processes(name):
                with suppress(ProcessLookupError):  # it has ended with another
                    os.kill(pid, signal.SIGKILL)
        for outer in self._outer:
            outer.kill()  # and with it all that runs in its namespaces
            outer.wait(LIMIT_SECONDS)

    def _write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    @staticmethod
    def _await_child(outer: subprocess.Popen[bytes]) -> int:
        deadline = time.monotonic() + LIMIT_SECONDS
        while True:
            children = psutil.Process(outer.pid).children()
            if children and children[0].name() == "sshd":
                return children[0].pid
            assert outer.poll() is None and time.monotonic() < deadline, "a host did not start"
            time.sleep(0.05)

    def _await_sshd(self) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        probe = ["ssh", "-F", self.folder / "ssh_config", "-o", "StrictHostKeyChecking=accept-new"]
        for name in list(ADDRESSES)[1:]:
            while True:
                done = subprocess.run(self.on("hostA", *probe, name, "true"), capture_output=True, text=True)
                if done.returncode == 0:
                    break
                assert time.monotonic() < deadline, done.stderr
                time.sleep(0.1)

    def _ip(self, *words: str, inside: int) -> None:
        _inside(inside, "ip", *words)


def _inside(process: int, *command: str) -> None:
    """Run a command in the network of a process."""
    subprocess.run(["nsenter", "-t", str(process), "-n", *command], check=True, capture_output=True)
