"""Two hosts on one machine: namespaces of network, name, mounts, processes and IPC, joined by a virtual cable, an sshd in each.

They share the file system, so the same Python, the same Horovod and the same script are everywhere. Interface names differ on
purpose. Needs root, iproute2 and openssh-server.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

LIMIT_SECONDS = 30
ADDRESSES = {"hostA": "10.77.0.1", "hostB": "10.77.0.2"}
INTERFACES = {"hostA": "ethA", "hostB": "fabricB0"}
_SSHD = "/usr/sbin/sshd"

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
    missing = [tool for tool in ("ip", "ssh", "ssh-keygen", "unshare", "nsenter", _SSHD) if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}: apt-get install iproute2 openssh-server"
    done = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True)
    return f"this machine allows no namespaces: {done.stderr.strip()}" if done.returncode else ""


@dataclass
class Hosts:
    """Both hosts, from :meth:`start` to :meth:`close`."""

    folder: Path
    init: dict[str, int] = field(default_factory=dict)
    """The first process of each, which listens for ssh."""
    cut: bool = False
    """Whether a cable has been pulled out: sshd keeps a connection that is silent, until the kernel gives it up."""
    _outer: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        self._write("hosts", "127.0.0.1 localhost\n" + "".join(f"{ip} {name}\n" for name, ip in ADDRESSES.items()))
        self._write("ssh_config", (_SSH_CONFIG + _KEY).format(folder=self.folder))
        self._write("keyless_config", _SSH_CONFIG.format(folder=self.folder))
        for key in ("id", "other_id", *(f"key_{name}" for name in ADDRESSES)):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / key], check=True)
        for name in ADDRESSES:
            self._write(f"{name}.conf", _SSHD_CONFIG.format(folder=self.folder, name=name))
            script = _INIT.format(folder=self.folder, name=name, sshd=_SSHD)
            options = ["--net", "--uts", "--mount", "--pid", "--ipc", "--fork", "--mount-proc", "--kill-child"]
            null = subprocess.DEVNULL
            outer = subprocess.Popen(
                ["unshare", *options, "sh", "-ec", script], stdin=null, stdout=null, stderr=null, start_new_session=True
            )
            self._outer.append(outer)
            self.init[name] = self._await_child(outer)
        a, b = (str(self.init[name]) for name in ADDRESSES)
        self._ip("link", "add", "name", "hvdA", "netns", a, "type", "veth", "peer", "name", "hvdB", "netns", b)
        for name, old in (("hostA", "hvdA"), ("hostB", "hvdB")):
            self._ip("link", "set", old, "name", INTERFACES[name], host=name)
            self._ip("addr", "add", f"{ADDRESSES[name]}/24", "dev", INTERFACES[name], host=name)
            self.link(name, up=True)
        self._await_sshd()

    def on(self, name: str, *command: str | Path, folder: Path = Path("/")) -> list[str]:
        """The words that run a command on a host, in ``folder``."""
        return ["nsenter", "-t", str(self.init[name]), "-a", "-r", f"--wd={folder}", *map(str, command)]

    def link(self, name: str, *, up: bool) -> None:
        """Plug a host's cable in, or pull it out: neither side gets any message of that."""
        self.cut = self.cut or not up
        self._ip("link", "set", INTERFACES[name], "up" if up else "down", host=name)

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

    def await_nothing(self, seconds: float) -> None:
        """Fail unless everything ends on both hosts within ``seconds``."""
        deadline = time.monotonic() + seconds
        while left := {name: found for name in ADDRESSES if (found := self._left(name))}:
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.1)

    def _left(self, name: str) -> dict[int, str]:
        found = self.processes(name).items()
        return {pid: line for pid, line in found if not (self.cut and line.startswith("sshd: "))}

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
        while True:
            done = subprocess.run(self.on("hostA", *probe, "hostB", "true"), capture_output=True, text=True)
            if done.returncode == 0:
                return
            assert time.monotonic() < deadline, done.stderr
            time.sleep(0.1)

    def _ip(self, *words: str, host: str = "") -> None:
        inside = ["nsenter", "-t", str(self.init[host]), "-n"] if host else []
        subprocess.run([*inside, "ip", *words], check=True, capture_output=True)
