"""How a rank knows that another one's process has ended, after all have left the job."""

from __future__ import annotations

import socket
import subprocess
import sys

from horovod.control.mesh import Endpoint
from horovod.control.processes import own_process_namespace
from horovod.core.lifecycle.other_processes import OtherProcesses


def endpoint(rank: int, pid: int, namespace: str) -> Endpoint:
    return Endpoint(rank, "host", pid, 0, (), "", process_namespace=namespace)


def test_processes_of_this_host_are_looked_at() -> None:
    here = own_process_namespace()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    others = OtherProcesses(1, [endpoint(0, process.pid, here), endpoint(1, -1, here), endpoint(2, -1, "elsewhere")])
    assert others.gone() == ""
    process.communicate(b"\n")
    assert others.gone() == "rank 0"


def test_processes_of_other_hosts_are_known_by_connections_that_outlast_the_job() -> None:
    """What has arrived on them, and that the job closes its own descriptors, tells nothing."""
    pairs = {rank: socket.socketpair() for rank in (1, 2, 3)}
    others = OtherProcesses(0, [endpoint(rank, -1, f"host {rank}") for rank in range(4)])
    others.keep({rank: near for rank, (near, _) in pairs.items()})
    theirs = {rank: far.dup() for rank, (_, far) in pairs.items()}  # what the other processes keep
    assert len(others.descriptors()) == 3
    for near, far in pairs.values():
        far.send(b"bye")
        near.close()
        far.close()
    assert others.gone() == ""
    theirs[2].close()
    assert others.gone() == "rank 2"
    theirs[3].close()
    assert others.gone() == "ranks 2-3"
    others.close()
    assert others.gone() == "" and others.descriptors() == []
    theirs[1].close()
