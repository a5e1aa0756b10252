"""Who goes on after a lost rank, for ``benchmarks/elastic.py``: how each is started, what is measured of it, and its limits.

Limits by which a contender notices a loss, or waits, are as low as it bears on two cores; ``limits`` says which.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

WORKER = Path(__file__).with_name("elastic_worker.py")
SECONDS = 300
"""How long one job may take."""

IN_THEIR_PROCESSES = {
    "noticed": "the loss is noticed, all tensors are free",
    "met": "the others have met and are connected",
    "synchronised": "all have one state",
    "step": "first step",
}


class Contender(ABC):
    """One way to go on.

    Attributes:
        name: in records, and of the worker's part.
        parts: what a worker notes, and what it has done since the note before.
        limits: what was set so that it goes on soon, in words; "" if it has nothing to set.
        replaces: whether a new process takes the place of the lost one.
    """

    name: str
    parts: ClassVar[dict[str, str]]
    limits = ""
    replaces = False

    def obstacle(self) -> str:
        """Why it cannot run here; "" if it can."""
        return ""

    @abstractmethod
    def run(self, folder: Path, ranks: int, victim: int) -> None:
        """Run a job in which rank ``victim`` is killed, to its end. The workers write to ``folder``.

        Raises:
            SystemExit: the job has failed.
        """

    def worker(self, folder: Path, victim: int) -> list[str]:
        return [str(WORKER), self.name, str(folder), str(victim)]

    def launch(self, *words: str) -> None:
        """Run a launcher to its end."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", *words], env=environment, capture_output=True, text=True, timeout=SECONDS
        )
        if done.returncode:
            sys.exit(f"{self.name} failed with exit code {done.returncode}:\n{done.stderr}")


class Horovodrun(Contender):
    """``hvd.DistributedOptimizer`` and a state with ``rollback="step"``: the ranks that are left go on in their processes."""

    name = "horovodrun"
    parts: ClassVar = IN_THEIR_PROCESSES

    def run(self, folder: Path, ranks: int, victim: int) -> None:
        hosts = ["-H", f"localhost:{ranks}", "--min-np", str(ranks - 1)]
        self.launch("horovod.runner.launch", *hosts, sys.executable, *self.worker(folder, victim))


class HorovodrunDdp(Horovodrun):
    """The same with PyTorch's DistributedDataParallel on ``init_process_group("horovod")``."""

    name = "horovodrun, DDP"


class Torchrun(Contender):
    """DDP on Gloo; new processes go on from a checkpoint, which rank 0 writes after each step."""

    name = "torchrun"
    parts: ClassVar = {
        "started": "the loss is noticed, all are ended and new ones started",
        "imported": "they import PyTorch",
        "met": "they have met, model and checkpoint are loaded",
        "step": "first step",
    }
    limits = "--monitor-interval 0.01"
    replaces = True

    def run(self, folder: Path, ranks: int, victim: int) -> None:
        words = ["--standalone", f"--nproc-per-node={ranks}", "--max-restarts=1", *self.limits.split()]
        self.launch("torch.distributed.run", *words, *self.worker(folder, victim))


class Torchft(Contender):
    """torchft's DDP, optimizer wrapper and manager on its Gloo group; each process is a replica group of its own.

    If its limits are too short for the machine, ranks that run are left out, and its job fails. Then they are doubled.

    Attributes:
        patience: the milliseconds without a heartbeat after which a replica counts as dead, those to wait for replicas that
            send heartbeats but do not join, and those of a collective: the ranks that are not connected to the lost one wait
            for as long.
    """

    name = "torchft"
    parts: ClassVar = {
        "noticed": "the loss is noticed, the step is given up",
        "step": "the others have a quorum and a group, and have made a step",
    }
    TICK = 10
    """The milliseconds between two looks at the quorum."""
    DEFAULT = 5000
    """What torchft waits for a heartbeat unless it is told otherwise."""

    def __init__(self) -> None:
        self.patience = 250

    @property
    def limits(self) -> str:  # type: ignore[override]
        waits = f"heartbeat timeout, join timeout and timeout of collectives {self.patience} ms"
        return f"{waits}, heartbeats every {self.patience // 10} ms, quorum tick {self.TICK} ms"

    def obstacle(self) -> str:
        there = importlib.util.find_spec("torchft") is not None
        return "" if there else "it is not installed: pip install torchft"

    def run(self, folder: Path, ranks: int, victim: int) -> None:
        while failure := self._try(folder, ranks, victim):
            if self.patience >= self.DEFAULT:
                sys.exit(failure)
            self.patience *= 2
            for path in folder.iterdir():
                path.unlink()

    def _try(self, folder: Path, ranks: int, victim: int) -> str:
        """Run the job once; why it has failed, "" if it has not."""
        os.environ.setdefault("RUST_LOG", "error")  # else the lighthouse logs every quorum
        from torchft.coordination import LighthouseServer

        lighthouse = LighthouseServer(
            bind="[::]:0",
            min_replicas=ranks - 1,
            join_timeout_ms=self.patience,
            quorum_tick_ms=self.TICK,
            heartbeat_timeout_ms=self.patience,
        )
        workers = []
        try:
            for rank in range(ranks):
                own = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "TORCHFT_LIGHTHOUSE": lighthouse.address()}
                own |= {"OMP_NUM_THREADS": "1", "PATIENCE_MILLISECONDS": str(self.patience)}
                with (folder / f"log.{rank}").open("w") as log:
                    command = [sys.executable, *self.worker(folder, victim)]
                    workers.append(
                        subprocess.Popen(command, env={**os.environ, **own}, stdout=log, stderr=subprocess.STDOUT)
                    )
            deadline = time.monotonic() + SECONDS
            for rank, worker in enumerate(workers):
                code = worker.wait(max(0.1, deadline - time.monotonic()))
                if code != (-signal.SIGKILL if rank == victim else 0):
                    said = (folder / f"log.{rank}").read_text()
                    return f"torchft: rank {rank} ended with exit code {code}:\n{said[-4000:]}"
            return ""
        except subprocess.TimeoutExpired:
            return f"torchft: the job does not end within {SECONDS} s"
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
            lighthouse.shutdown()


CONTENDERS: list[Contender] = [Horovodrun(), HorovodrunDdp(), Torchft(), Torchrun()]
