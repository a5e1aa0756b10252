"""Disturbs jobs at random whose default group changes its members by ``torch.distributed._reconfigure``, and judges them.

    python tests/reconfigure_events.py --jobs 10 --events 20 --seed 1

No launcher takes part: this program starts the ranks by forking, gives them a store, and says which processes are the next
members. In a job of four ranks that train a DistributedDataParallel it kills, stops or crashes one at a random moment, has one
raise an exception, or starts another one, which joins. After each event

- the processes that are left go on, with the same process ids;
- ranks at the same step have the same weights and buffers, to the bit.

At the end of a job all have the same result, to the bit, and it is that of the same steps of the same numbers of ranks in one
process (float64), where a step that failed was made again from the last commit.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # with the first optimizer, which would cost each rank seconds
import torch.distributed
from torch import nn

import elastic_ddp_rank as training
import horovod.torch.distributed.making  # noqa: F401  with the first group
from reconfiguring import Member
from time_limits import JOB, SOON

dist: Any = torch.distributed
EVENTS = ["kill", "kill", "segfault", "raise", "stop", "join"]
RANKS = 4
_PR_SET_PDEATHSIG = 1
_MEET_SECONDS = 5.0
"""How long members may take to meet. One may be lost meanwhile; then the others ask again."""


class Disturbed(Exception):
    """The driver has asked this process to raise."""


# A rank.


class BecomesRank(BaseException):
    """Leaves the driver's frames in a process that was forked for a rank, so that the rank ends as any script does."""


def rank_main(number: int, port: int) -> None:
    """Train until the driver says that it is enough."""
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=JOB))
    member = Member(number, 1 << 20, store)
    model, optimizer = training.made()
    saved: Any = _copy(model, optimizer, 0, [])
    ddp: Any = None
    for question in range(1 << 20):
        step, runs = _restore(model, optimizer, saved)
        store.set(f"ask/{number}/{question}", json.dumps([member.handle(), step, _digest(model), ddp is not None]))
        answer = json.loads(store.get(f"answer/{number}/{question}"))
        if answer is None:
            store.set(f"result/{number}", json.dumps([step, _digest(model), [], runs, training.values_of(model)]))
            return
        uuid, handles = answer
        try:
            member.reconfigure(uuid, handles, seconds=_MEET_SECONDS)
            saved = _furthest(saved)
            step, runs = _restore(model, optimizer, saved)
            if ddp is None:
                ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.002)
            rank, size = dist.get_rank(), dist.get_world_size()
            while True:
                changes = torch.tensor(float(rank == 0 and store.check([f"change/{uuid}"])))
                dist.broadcast(changes, 0)
                if changes.item():
                    break
                optimizer.zero_grad()
                training.loss_of(ddp, step, rank).backward()
                if store.check([f"raise/{number}"]):
                    store.set(f"raises/{number}", "")
                    raise Disturbed(f"process {number}, step {step}")
                optimizer.step()
                before = runs[-1][1] if runs and runs[-1][0] == size else 0
                step, runs = step + 1, [*runs[: len(runs) - bool(before)], (size, before + 1)]
                saved = _copy(model, optimizer, step, runs)
        except RuntimeError as error:
            store.set(f"failure/{number}/{question}", f"{type(error).__name__}: {error}")


def _copy(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, runs: list[tuple[int, int]]) -> Any:
    return copy.deepcopy((model.state_dict(), optimizer.state_dict(), step, runs))


def _restore(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Any) -> tuple[int, list[tuple[int, int]]]:
    weights, momenta, step, runs = copy.deepcopy(saved)
    model.load_state_dict(weights)
    optimizer.load_state_dict(momenta)
    return step, runs


def _furthest(saved: Any) -> Any:
    """The commit of the rank that is furthest. All members call it."""
    steps: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(steps, saved[2])
    furthest = steps.index(max(steps))
    shared = [saved]
    dist.broadcast_object_list(shared, furthest)
    return shared[0]


def _digest(model: nn.Module) -> str:
    return hashlib.sha256(np.array(training.values_of(model)).tobytes()).hexdigest()


# The driver.


class Events:
    """One job.

    Args:
        seed: of the events and their moments.
        events: how many.
        folder: for what the ranks print.
        log: whether to print each event.
    """

    def __init__(self, seed: int, events: int, folder: Path, log: bool) -> None:
        self._log = log
        self._began = time.monotonic()
        self._chance = random.Random(seed)
        self._count = events
        self._folder = folder
        self._pid = os.getpid()
        self._server, self._port = _store_server()
        self._store = dist.TCPStore("127.0.0.1", self._port, timeout=timedelta(seconds=JOB))
        self._processes: dict[int, int] = {}
        self._questions: dict[int, int] = {}
        self._lost: set[int] = set()  # their ends are awaited
        self._raising: set[int] = set()  # they end in their next step, if they come to it
        self._stopped = -1
        self._started = self._uuid = 0
        self.happened: list[str] = []
        self.seconds: list[tuple[float, str]] = []

    def run(self) -> str:
        """What went wrong; "" for nothing."""
        try:
            for _ in range(RANKS):
                self._start()
            self._form()
            for _ in range(self._count):
                time.sleep(self._chance.choice([0.0, 0.01, 0.1, 0.3]) * self._chance.random())  # at any moment
                self._cause()
                self._form()
            time.sleep(0.2)  # some steps after the last event
            return self._judge()
        except AssertionError as error:
            return str(error)
        finally:
            if os.getpid() == self._pid:
                for pid in [*self._processes.values(), self._server]:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)

    def _start(self) -> int:
        number, self._started = self._started, self._started + 1
        pid = _fork()
        if pid == 0:
            log = os.open(self._folder / f"log.{number}", os.O_CREAT | os.O_WRONLY)
            os.dup2(log, 1)
            os.dup2(log, 2)
            raise BecomesRank(number, self._port)
        self._processes[number], self._questions[number] = pid, 0
        return number

    def _cause(self) -> None:
        """Cause one event."""
        event = self._chance.choice(EVENTS)
        if len(self._questions) == 1:
            event = "join"
        elif event == "join" and len(self._questions) > RANKS + 1:
            event = "kill"
        if event == "join":
            number = self._start()
            self._wait_for([f"ask/{number}/0"])
            self._store.set(f"change/{self._uuid}", "")
        else:
            number = self._chance.choice(sorted(self._questions))
            pid = self._processes[number]
            if event == "raise":
                self._raising.add(number)
                self._store.set(f"raise/{number}", "")
            elif event == "stop":
                del self._questions[number]
                self._stopped = number
                os.kill(pid, signal.SIGSTOP)
            else:
                self._lost.add(number)
                os.kill(pid, {"kill": signal.SIGKILL, "segfault": signal.SIGSEGV}[event])
        self.happened.append(f"{event} {number}")
        if self._log:
            print(f"{time.monotonic() - self._began:.2f} s: {self.happened[-1]}", flush=True)

    def _form(self) -> None:
        """Wait until all processes ask for the next members, and say that it is they."""
        began = time.monotonic()
        asks = self._asks()
        if self.happened:
            self.seconds.append((time.monotonic() - began, self.happened[-1]))
        digests: dict[int, set[str]] = {}
        for _, step, digest, _ in asks.values():
            digests.setdefault(step, set()).add(digest)
        assert all(len(each) == 1 for each in digests.values()), f"weights differ: {asks} after {self.happened}"
        steps = [step for _, step, _, has_trained in asks.values() if has_trained]
        assert not steps or max(steps) - min(steps) <= 1, f"ranks are at steps {steps} after {self.happened}"
        self._uuid += 1
        order = self._chance.sample(sorted(asks), len(asks))
        self._answer([self._uuid, [asks[number][0] for number in order]])

    def _asks(self) -> dict[int, Any]:
        """Wait until all processes ask, but for those that have been disturbed and do not: what each says."""
        deadline = time.monotonic() + SOON
        while True:
            self._reap()
            keys = [f"ask/{number}/{question}" for number, question in self._questions.items()]
            if not self._lost and not self._missing(keys):
                break
            assert time.monotonic() < deadline, f"{self._missing(keys)} did not come after {self.happened}"
            time.sleep(0.005)
        if self._stopped in self._processes:  # it has been lost for the others
            os.kill(self._processes[self._stopped], signal.SIGKILL)
            self._raising.add(self._stopped)
            self._stopped = -1
        return {number: json.loads(self._store.get(key)) for number, key in zip(self._questions, keys, strict=True)}

    def _answer(self, answer: Any) -> None:
        for number, question in self._questions.items():
            self._store.set(f"answer/{number}/{question}", json.dumps(answer))
            self._questions[number] += 1

    def _reap(self) -> None:
        """Forget processes that have ended; only those that were to end may."""
        for number in self._raising & self._questions.keys():
            if self._store.check([f"raises/{number}"]):
                del self._questions[number]
        for number, pid in list(self._processes.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self._processes[number]
                self._questions.pop(number, None)
                log = (self._folder / f"log.{number}").read_text()
                meant = number in self._lost | self._raising
                assert meant, f"process {number} has ended after {self.happened}: {log[-2000:]}"
                self._lost.discard(number)

    def _missing(self, keys: list[str]) -> list[str]:
        return [key for key in keys if not self._store.check([key])]

    def _wait_for(self, keys: list[str]) -> None:
        deadline = time.monotonic() + SOON
        while self._missing(keys):
            assert time.monotonic() < deadline, f"{self._missing(keys)} did not come after {self.happened}"
            time.sleep(0.005)

    def _judge(self) -> str:
        self._store.set(f"change/{self._uuid}", "")
        self._asks()
        results = [f"result/{number}" for number in self._questions]
        self._answer(None)
        self._wait_for(results)
        problem = training.judge([json.loads(self._store.get(each)) for each in results])
        return f"{problem} after {self.happened}" if problem else ""


def _fork() -> int:
    """Fork a process that ends with this one."""
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return pid


def _store_server() -> tuple[int, int]:
    """A process that has the store, and its port."""
    reading, writing = os.pipe()
    pid = _fork()
    if pid == 0:
        os.close(reading)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, str(store.port).encode())
        os.close(writing)
        while True:
            signal.pause()
    os.close(writing)
    with os.fdopen(reading) as pipe:
        return pid, int(pipe.read())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--events", type=int, default=20, help="in each job")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", action="store_true", help="print each event")
    arguments = parser.parse_args()
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "3"  # after which a stopped rank is lost
    failed = 0
    for seed in range(arguments.seed, arguments.seed + arguments.jobs):
        sys.stdout.flush()
        pid = _fork()  # a job computes its reference itself, and this process must not: it forks
        if pid == 0:
            folder = Path(tempfile.mkdtemp(prefix="horovod-reconfigure-"))
            job = Events(seed, arguments.events, folder, arguments.log)
            problem = job.run()
            shutil.rmtree(folder)
            median, longest = sorted(job.seconds)[len(job.seconds) // 2], max(job.seconds)
            print(
                f"seed {seed}: {len(job.happened)} events, {problem or 'right'}; until all had asked: median "
                f"{median[0]:.2f} s, longest {longest[0]:.2f} s ({longest[1]})",
                flush=True,
            )
            os._exit(bool(problem))
        failed += os.waitpid(pid, 0)[1] != 0
    return failed


if __name__ == "__main__":
    become: tuple[int, int] | None = None
    try:
        sys.exit(main())
    except BecomesRank as rank:
        become = rank.args
    rank_main(*become)
