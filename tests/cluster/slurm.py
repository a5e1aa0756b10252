"""A real Slurm on the two hosts of :mod:`cluster.hosts`: nodes n1 (on hostA, with the controller) and n2 (on hostB).

Each host has a MUNGE daemon of its own, with the same key. All daemons run inside the hosts' namespaces, so they end with them,
and configuration, spools and logs are in the test's folder. Needs root and the packages slurm-wlm and munge.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time
from pathlib import Path

from cluster.hosts import ADDRESSES, LIMIT_SECONDS, Hosts

NODES = {"n1": "hostA", "n2": "hostB"}
_CONFIG = """
ClusterName=test
SlurmctldHost=hostA({address})
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerType=sched/builtin
KillWait=5
MinJobAge=10
{nodes}
PartitionName=p Nodes=n1,n2 Default=YES MaxTime=INFINITE OverTimeLimit=0 State=UP
"""


def obstacle() -> str:
    """Why there can be no Slurm on this machine, or ""."""
    missing = [tool for tool in ("slurmctld", "slurmd", "srun", "salloc", "munged") if shutil.which(tool) is None]
    return f"needs {', '.join(missing)}: apt-get install slurm-wlm munge" if missing else ""


class Slurm:
    """Slurm on ``hosts``, from :meth:`start` until the hosts are closed."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.folder = hosts.folder / "slurm"
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self._daemons: frozenset[int] = frozenset()

    def start(self) -> None:
        for name in ("state", "spool.n1", "spool.n2"):
            (self.folder / name).mkdir(parents=True)
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr={ADDRESSES[host]} CPUs=4 State=UNKNOWN"
            for node, host in NODES.items()
        )
        text = _CONFIG.format(folder=self.folder, address=ADDRESSES["hostA"], nodes=nodes)
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # "disabled" makes slurmd 22.05 exit
        for name in ADDRESSES:
            # A folder of its own for MUNGE's socket, which all programs look for at one fixed path.
            self.run(name, "sh", "-ec", "mount -t tmpfs tmpfs /run; mkdir -m 755 /run/munge")
            self.run(
                name, "munged", f"--key-file={key}", f"--log-file={self.folder}/munged.{name}.log",
                f"--seed-file={self.folder}/munged.{name}.seed", "--force",
            )  # fmt: skip
        self.run("hostA", "slurmctld")
        for node, host in NODES.items():
            self.run(host, "slurmd", "-N", node)
        deadline = time.monotonic() + LIMIT_SECONDS
        while self.run("hostA", "sinfo", "-h", "-t", "idle", "-o", "%D").strip() != "2":
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.1)
        self._daemons = frozenset(pid for host in ADDRESSES for pid in self.hosts.processes(host))

    def run(self, host: str, *command: str | Path) -> str:
        """Run a command on a host to its end; its output."""
        done = subprocess.run(
            self.hosts.on(host, *command), env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}{self.logs()}"
        return done.stdout

    def processes(self) -> dict[int, str]:
        """What runs on the hosts beside the daemons of Slurm, MUNGE and ssh: process ids and command lines."""
        found = {pid: line for host in ADDRESSES for pid, line in self.hosts.processes(host).items()}
        return {pid: line for pid, line in found.items() if pid not in self._daemons}

    def await_nothing(self, seconds: float) -> None:
        """Fail unless all jobs, and all their processes on both nodes, end within ``seconds``."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) or self.run("hostA", "squeue", "-h", "-o", "%i %T"):
            assert time.monotonic() < deadline, f"left behind: {left or 'a job that Slurm does not end'}"
            time.sleep(0.1)

    def logs(self) -> str:
        return "".join(f"\n{path.name}: {path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))
