"""How much of a training step is left when ranks work together: step times, scaling efficiency, and DDP beside it.

    python benchmarks/training.py                     # 2 ranks, three models
    python benchmarks/training.py --peer ddp --plot training.png

The arrangements, each with one PyTorch thread per rank and the same batch per rank
    alone         one process, plain PyTorch: no Horovod in it
    alone, kept   the same with the memory settings that horovodrun gives its ranks, by which the allocator keeps a step's
                  memory for the next one: what of the gain is due to them
    hvd, 1 rank   the same under ``horovodrun -np 1`` with ``horovod.torch``: against the line above, what the wrapper costs
    side by side  as many plain processes as ranks, at once, that know nothing of each other: they share the machine's
                  caches, memory and power, so no way of training together can be faster than this
    hvd           the ranks train one model with ``hvd.DistributedOptimizer``
    ddp           the same with PyTorch's DistributedDataParallel on Gloo (``--peer ddp``)

What is measured, and how
    All arrangements of a model stay in memory and take turns of about a second; those that wait, sleep. The order
    changes from round to round, and the first step of a turn is not counted. A turn's *step time* is the time its
    slowest rank takes for the counted steps, divided by their number; the table has the median over the rounds.
    *Efficiency* is alone / this: the share of one plain process's speed that is left to each rank. Ratios are taken within
    each round, and the median of the rounds is shown, so that a slow minute of the machine, which slows everyone, does not
    count. Where a process happens to get its memory can make it faster or slower by several percent for as long as it
    lives; with ``--restarts`` all are started anew, and the rounds are pooled.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection
from pathlib import Path

import machine
import torch
import training_report as report
from training_report import ALONE, DDP, HVD, KEPT, ONE_RANK, SIDE_BY_SIDE, Result
from workloads import WORKLOADS, Workload

from horovod.runner import worker_environment

TURN_SECONDS = 1.0
START_TIMEOUT_SECONDS = 120.0

_DDP_OPTIONS = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
BUFFERS_OPTION = "forward_sync_buffers" if "forward_sync_buffers" in _DDP_OPTIONS else "broadcast_buffers"
"""What DDP calls the broadcast of running statistics; renamed in PyTorch 2.13."""


def main() -> None:
    options = parse_arguments()
    if options.worker:
        return work(options)
    arrangements = [ALONE, KEPT, ONE_RANK, SIDE_BY_SIDE, HVD, *([DDP] if options.peer else [])]
    description = machine.describe()
    results = []
    for model in options.models:
        print(f"{model}: starting {len(arrangements)} arrangements", flush=True)
        results.append(measure(model, arrangements, options))
    report.print_table(results, options.np, description)
    if options.json:
        record = {"machine": description, "ranks": options.np, "models": [result.to_dict() for result in results]}
        options.json.write_text(json.dumps(record, indent=1))
    if options.plot:
        report.plot(results, options.np, description, options.plot)


def measure(model: str, arrangements: list[str], options: argparse.Namespace) -> Result:
    """Let the arrangements take turns at one model: ``--rounds`` rounds with each of ``--restarts`` sets of processes."""
    seconds: dict[str, list[float]] = {arrangement: [] for arrangement in arrangements}
    for _ in range(options.restarts):
        with started(model, arrangements, options.np) as teams:
            for team in teams.values():
                turn(team, 1)  # the first step of all allocates memory and makes connections
            steps = min(20, max(3, math.ceil(TURN_SECONDS / turn(teams[ALONE], 2))))
            for number in range(options.rounds):
                first = number % len(arrangements)
                for arrangement in arrangements[first:] + arrangements[:first]:
                    seconds[arrangement].append(turn(teams[arrangement], steps))
    workload = WORKLOADS[model]()
    return Result(model, workload.parameters, len(list(workload.model.parameters())), seconds)


def turn(team: list[Connection], steps: int) -> float:
    """The step time of one turn: every rank of the team makes ``steps`` steps, the slowest decides."""
    for rank in team:
        rank.send(steps)
    return max(float(rank.recv()) for rank in team) / steps


@contextmanager
def started(model: str, arrangements: list[str], ranks: int) -> Iterator[dict[str, list[Connection]]]:
    """Every arrangement's processes, each waiting on its connection for a number of steps; all ended on leaving."""
    teams: dict[str, list[Connection]] = {arrangement: [] for arrangement in arrangements}
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
                team = 1 if arrangement in (ALONE, KEPT, ONE_RANK) else ranks
                missing += team
                processes += launch(arrangement, team, ["--models", model, "--worker", address])
            deadline = time.monotonic() + START_TIMEOUT_SECONDS
            while missing:
                try:
                    connection = Connection(listener.accept()[0].detach())
                except TimeoutError:
                    ended = [process for process in processes if process.poll() is not None]
                    if ended or time.monotonic() > deadline:
                        sys.exit(f"{model}: could not start: {ended[0].args if ended else 'no answer in time'}")
                    continue
                teams[connection.recv()].append(connection)
                missing -= 1
            yield teams
        finally:
            for team in teams.values():
                for connection in team:
                    connection.close()
            for process in processes:
                try:
                    process.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def launch(arrangement: str, ranks: int, arguments: list[str]) -> list[subprocess.Popen[bytes]]:
    """Start the processes of one arrangement."""
    worker = [sys.executable, __file__, "--arrangement", arrangement, *arguments]
    if arrangement in (ONE_RANK, HVD):
        return [subprocess.Popen([sys.executable, "-m", "horovod.runner.launch", "-np", str(ranks), *worker])]
    if arrangement == KEPT:
        return [subprocess.Popen(worker, env={**os.environ, **worker_environment.memory(os.environ)})]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    meeting["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return [subprocess.Popen(worker, env={**os.environ, **meeting, "RANK": str(rank)}) for rank in range(ranks)]


def work(options: argparse.Namespace) -> None:
    """One process of one arrangement: make as many steps as it is told, say how long they took, until nobody asks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the one that asks, and thereby this
    torch.set_num_threads(1)
    torch.manual_seed(1)
    step = prepare_step(options.arrangement, WORKLOADS[options.models[0]]())
    with Client(str(options.worker)) as connection:
        connection.send(options.arrangement)
        try:
            while True:
                steps = connection.recv()
                step()  # not counted
                started = time.perf_counter()
                for _ in range(steps):
                    step()
                connection.send(time.perf_counter() - started)
        except (EOFError, OSError):
            pass  # nobody asks any more


def prepare_step(arrangement: str, workload: Workload) -> Callable[[], None]:
    """One training step as the arrangement's users write it."""
    model = workload.model
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if arrangement in (ONE_RANK, HVD):
        import horovod.torch as hvd  # here, so that the plain arrangements are without it

        hvd.init()
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    elif arrangement == DDP:
        torch.distributed.init_process_group("gloo")
        # Horovod leaves running statistics to each rank; broadcasting them in every step would be work it does not do.
        model = torch.nn.parallel.DistributedDataParallel(model, **{BUFFERS_OPTION: False})

    def step() -> None:
        optimizer.zero_grad()
        workload.loss(model).backward()
        optimizer.step()

    return step


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--np", type=int, default=2, metavar="RANKS")
    parser.add_argument("--models", type=models, default=list(WORKLOADS), metavar="NAME,...")
    parser.add_argument("--peer", choices=["ddp"], help="measure this in the same run")
    parser.add_argument("--restarts", type=int, default=2, help="sets of processes to measure with (default: 2)")
    parser.add_argument("--rounds", type=int, default=6, help="turns of every arrangement in each (default: 6)")
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--plot", type=Path, metavar="PATH.png")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--arrangement", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(options.np, options.restarts, options.rounds) < 1:
        parser.error("--np, --restarts and --rounds must be at least 1")
    return options


def models(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(WORKLOADS):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(WORKLOADS)}")
    return names


if __name__ == "__main__":
    main()
