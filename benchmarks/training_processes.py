"""Starts the processes that ``training.py`` measures, gives them their turns, and ends them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from launching import horovodrun
from training_arrangements import KERAS_2, MWMS, OF_ONE_PROCESS, UNDER_HOROVODRUN, WITH_DDP

from horovod.runner import worker_environment

START_TIMEOUT_SECONDS = 300.0
END_TIMEOUT_SECONDS = 20.0
WORKER = Path(__file__).with_name("training_worker.py")


@dataclass
class Team:
    """The processes of one arrangement, each waiting for a number of steps.

    Attributes:
        parameters, tensors: the size of what they train.
    """

    ranks: list[Connection] = field(default_factory=list)
    parameters: int = 0
    tensors: int = 0

    def turn(self, steps: int) -> float:
        """The step time of one turn: every rank makes ``steps`` steps beyond a first one; the slowest decides."""
        for rank in self.ranks:
            rank.send(steps)
        return max(float(rank.recv()) for rank in self.ranks) / steps


@contextmanager
def started(framework: str, model: str, arrangements: Sequence[str], ranks: int) -> Iterator[dict[str, Team]]:
    """Every arrangement's processes, ready for their turns; all ended on leaving."""
    teams = {arrangement: Team() for arrangement in arrangements}
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        # Only this user can enter the folder, so whoever connects was started here.
        address = str(Path(folder) / "socket")
        listener.bind(address)
        listener.listen()
        listener.settimeout(0.2)
        try:
            missing = 0
            for arrangement in arrangements:
                number = 1 if arrangement in OF_ONE_PROCESS else ranks
                missing += number
                processes += launch(framework, arrangement, number, model, address)
            deadline = time.monotonic() + START_TIMEOUT_SECONDS
            while missing:
                try:
                    connection = Connection(listener.accept()[0].detach())
                except TimeoutError:
                    ended = [process for process in processes if process.poll() is not None]
                    if ended or time.monotonic() > deadline:
                        reason = f"no answer in {START_TIMEOUT_SECONDS:g} seconds"
                        if ended:
                            reason = f"{ended[0].args} ended with status {ended[0].returncode}; its own words are above"
                        sys.exit(f"{model}: could not start: {reason}")
                    continue
                arrangement, parameters, tensors = connection.recv()
                team = teams[arrangement]
                team.ranks.append(connection)
                team.parameters, team.tensors = parameters, tensors
                missing -= 1
            yield teams
        finally:
            for team in teams.values():
                for connection in team.ranks:
                    connection.close()
            for process in processes:
                try:
                    process.wait(timeout=END_TIMEOUT_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def launch(framework: str, arrangement: str, ranks: int, model: str, address: str) -> list[subprocess.Popen[bytes]]:
    """Start the processes of one arrangement, all with the memory settings that horovodrun gives its ranks."""
    worker = [sys.executable, str(WORKER), "--framework", framework, "--arrangement", arrangement]
    worker += ["--model", model, "--address", address]
    environment = {**os.environ, **of_framework(framework, arrangement)}
    if arrangement in UNDER_HOROVODRUN:
        command = horovodrun(ranks, *UNDER_HOROVODRUN[arrangement], *worker)
        return [subprocess.Popen(command, env=environment)]
    environment |= worker_environment.memory(os.environ)
    meeting = meeting_of(arrangement, ranks)
    return [subprocess.Popen(worker, env=environment | meeting[rank]) for rank in range(ranks)]


def of_framework(framework: str, arrangement: str) -> dict[str, str]:
    """What a framework is told by the environment: which Keras is meant, and how much to say."""
    if framework == "torch":
        return {}
    legacy = framework == "keras" and arrangement in (KERAS_2, MWMS)
    stall = "3" if arrangement == MWMS else "2"  # its processes complain of one another when they end
    return {
        "KERAS_BACKEND": "tensorflow",
        "TF_USE_LEGACY_KERAS": str(int(legacy)),
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", stall),
    }


def meeting_of(arrangement: str, ranks: int) -> list[dict[str, str]]:
    """By which environment the ranks of a peer find one another on this machine."""
    if arrangement in WITH_DDP:
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0]), "WORLD_SIZE": str(ranks)}
        common["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        return [{**common, "RANK": str(rank)} for rank in range(ranks)]
    if arrangement == MWMS:
        cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(ranks)]}
        return [
            {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})}
            for rank in range(ranks)
        ]
    return [{}] * ranks


def free_ports(number: int) -> list[int]:
    """Different ports of the loopback interface that nobody listens on."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports
