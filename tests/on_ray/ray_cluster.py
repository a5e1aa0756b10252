"""A Ray cluster of two hosts of one machine; a third one stands by. The tests' programs run on the first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.hosts import ADDRESSES, Hosts
from time_limits import JOB, SOON

PROGRAM = Path(__file__).parent / "programs.py"
TRAINING = Path(__file__).parent / "train_programs.py"
"""Programs with Ray Train."""
TRAINING_SECONDS = 2 * JOB
"""How long a training may take, for which Ray starts all workers, and some of them again: each imports Ray and PyTorch."""
_HEAD = "hostA"
_PORT = 6379
_CLIENT_PORT = 10001


class RayCluster:
    """Two nodes of Ray with two CPUs each: the head, and :attr:`second`.

    Attributes:
        second, spare: hosts. A node that is lost leaves its host as the spare one.
    """

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts = hosts
        self.second, self.spare = "hostB", "hostC"
        self._folder = folder
        self._environment = {
            **os.environ,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            "RAY_COLOR_PREFIX": "0",
            "RAY_worker_niceness": "0",  # by default 15: on a busy machine workers would take minutes to start
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(JOB),
            "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": f"{JOB:.0f}",
            "PYTHONPATH": os.pathsep.join(
                [str(PROGRAM.parent), str(PROGRAM.parent.parent), os.environ.get("PYTHONPATH", "")]
            ),
        }

    def start(self) -> None:
        for name in (_HEAD, self.second):
            self._start_node(name)

    def replace_second(self) -> None:
        """Kill the second node, as when its machine is lost, and start another one on the spare host."""
        for process in self.hosts.find(self.second, "ray"):
            os.kill(process, 9)
        self.second, self.spare = self.spare, self.second
        self._start_node(self.second)

    def _start_node(self, name: str) -> None:
        own = self._folder / "ray"  # the same path everywhere, and another folder on each host
        self._run(name, "mount", "-t", "tmpfs", "tmpfs", own)
        where = [
            "--head", f"--port={_PORT}", f"--temp-dir={own}", "--include-dashboard=false",
            f"--ray-client-server-port={_CLIENT_PORT}",
        ] if name == _HEAD else [f"--address={ADDRESSES[_HEAD]}:{_PORT}"]  # fmt: skip
        self._run(
            name, sys.executable, "-m", "ray.scripts.scripts", "start", *where,
            f"--node-ip-address={ADDRESSES[name]}", "--num-cpus=2", "--object-store-memory=100000000",
        )  # fmt: skip

    def program(
        self, function: str, *arguments: str, script: Path = PROGRAM, client: bool = False
    ) -> subprocess.Popen[str]:
        """``script function arguments`` on the head, or as a client on the host outside the cluster."""
        where, address = (self.spare, f"ray://{ADDRESSES[_HEAD]}:{_CLIENT_PORT}") if client else (_HEAD, "auto")
        return self._open(where, script, function, *arguments, RAY_ADDRESS=address)

    def alone(self, script: Path, *arguments: str) -> str:
        """What a program prints that starts a cluster of its own, on the host outside this one; ``--folder`` is for results."""
        own = self._folder / "own"
        process = self._open(self.spare, script, *arguments, f"--folder={own}/results", RAY_TMPDIR=str(own))
        return self._output(process, TRAINING_SECONDS)

    def _open(self, host: str, script: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.hosts.on(host, sys.executable, script, *arguments, folder=self._folder),
            env={**self._environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def result(self, function: str, *arguments: str, script: Path = PROGRAM, client: bool = False) -> Any:
        """What a program prints as its last line, in JSON."""
        process = self.program(function, *arguments, script=script, client=client)
        return self.finish(process, TRAINING_SECONDS if script == TRAINING else JOB)

    def finish(self, process: subprocess.Popen[str], seconds: float = JOB) -> Any:
        output = self._output(process, seconds)
        (line,) = [line for line in output.splitlines() if line.startswith("result: ")]
        return json.loads(line.removeprefix("result: "))

    @staticmethod
    def _output(process: subprocess.Popen[str], seconds: float) -> str:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            pytest.fail(f"the program did not end:\n{output}")
        assert process.returncode == 0, output
        return output

    def _run(self, name: str, *command: str | Path) -> None:
        done = subprocess.run(
            self.hosts.on(name, *command, folder=self._folder),
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=SOON,
        )
        assert done.returncode == 0, done.stdout + done.stderr
