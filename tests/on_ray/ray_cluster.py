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
_PORT = 6379


class RayCluster:
    """Nodes of Ray with two CPUs each."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts = hosts
        self._folder = folder
        self._environment = {
            **os.environ,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            "RAY_COLOR_PREFIX": "0",
            "PYTHONPATH": os.pathsep.join(
                [str(PROGRAM.parent), str(PROGRAM.parent.parent), os.environ.get("PYTHONPATH", "")]
            ),
        }

    def start(self, name: str) -> None:
        """Start the node on a host; the first is the head."""
        own = self._folder / "ray"  # the same path everywhere, and another folder on each host
        self._run(name, "mount", "-t", "tmpfs", "tmpfs", own)
        head = name == "hostA"
        where = ["--head", f"--port={_PORT}", f"--temp-dir={own}", "--include-dashboard=false"] if head else [
            f"--address={ADDRESSES['hostA']}:{_PORT}"
        ]  # fmt: skip
        self._run(
            name, sys.executable, "-m", "ray.scripts.scripts", "start", *where,
            f"--node-ip-address={ADDRESSES[name]}", "--num-cpus=2", "--object-store-memory=100000000",
        )  # fmt: skip

    def kill(self, name: str) -> None:
        """Kill all of a node, as when its machine is lost."""
        for process in self.hosts.find(name, "ray"):
            os.kill(process, 9)

    def program(self, function: str, *arguments: str, script: Path = PROGRAM) -> subprocess.Popen[str]:
        """``script function arguments`` on the head."""
        words = self.hosts.on("hostA", sys.executable, script, function, *arguments, folder=self._folder)
        return subprocess.Popen(
            words,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def result(self, function: str, *arguments: str, script: Path = PROGRAM) -> Any:
        """What a program prints as its last line, in JSON."""
        return self.finish(
            self.program(function, *arguments, script=script), TRAINING_SECONDS if script == TRAINING else JOB
        )

    @staticmethod
    def finish(process: subprocess.Popen[str], seconds: float = JOB) -> Any:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            pytest.fail(f"the program did not end:\n{output}")
        assert process.returncode == 0, output
        (line,) = [line for line in output.splitlines() if line.startswith("result: ")]
        return json.loads(line.removeprefix("result: "))

    def _run(self, name: str, *command: str | Path) -> None:
        done = subprocess.run(
            self.hosts.on(name, *command, folder=self._folder),
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=SOON,
        )
        assert done.returncode == 0, done.stdout + done.stderr
