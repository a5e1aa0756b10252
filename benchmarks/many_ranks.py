"""Many real ranks on one machine: whether their results are right, their memory, the time of init() and of a barrier.

    python benchmarks/many_ranks.py                                 # 64 ranks on one host
    python benchmarks/many_ranks.py --jobs 1x64 16x4 2x1            # and 16 hosts of 4 ranks, and 2 of 1, as root

Where a job has several hosts, each is a network namespace with an address of its own; a bridge joins them. The namespaces are
this program's: it makes and removes them. Each rank is started with variables set by hand (docs/hosts.md). It imports no
framework.

The ranks share the cores, so the times are of an oversubscribed machine: they say that it works, not how fast hosts are.
Memory is a process's proportional set size, in which what processes share is divided among them.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import machine

PORT = 29_555
BARRIERS, STEPS = 20, 5
ALLREDUCES, ALLREDUCE_ROUNDS = (4_096, 65_536, 1 << 20, 1 << 24), 11
"""Bytes, and how often each is reduced; the median counts. ``scale_model.py`` fits a network to those of two hosts."""
LONGEST_SECONDS = 300
SOURCE = str(Path(machine.__file__).resolve().parents[1] / "src")
BENCHMARKS = str(Path(__file__).resolve().parent)


def main() -> None:
    options = parse_arguments()
    record = {"machine": machine.describe(()), "measured": []}
    print(machine.in_words(record["machine"]))
    for count, local in options.jobs:
        with hosts(count) as places:
            found = run(places, local)
        record["measured"].append({"hosts": count, "ranks": count * local, **found})
    print("\n".join(table(record)))
    if options.json:
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")


def table(record: dict[str, Any]) -> Iterator[str]:
    """One row a job."""
    yield "| hosts | ranks | init, s | barrier, ms | MiB a rank | sockets of rank 0 | of another rank | after an alltoall |"
    yield "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for found in record["measured"]:
        cells = [found["hosts"], found["ranks"], f"{found['init_seconds']:.1f}"]
        cells += [f"{found['barrier_seconds'] * 1000:.1f}", f"{found['mebibytes']:.0f}"]
        cells += [found["sockets_first"], found["sockets_most"], found["sockets_after_alltoall"]]
        yield f"| {' | '.join(map(str, cells))} |"


def run(places: list[tuple[list[str], str]], local: int) -> dict[str, Any]:
    """Start ``local`` ranks on each host, and wait for what they say."""
    count, size = len(places), len(places) * local
    address, secret = places[0][1], secrets.token_hex(16)
    ranks = []
    for rank in range(size):
        host = rank // local
        environment = {
            **os.environ,
            "PYTHONPATH": f"{BENCHMARKS}:{SOURCE}",
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": str(size),
            "HOROVOD_LOCAL_RANK": str(rank % local),
            "HOROVOD_LOCAL_SIZE": str(local),
            "HOROVOD_CROSS_RANK": str(host),
            "HOROVOD_CROSS_SIZE": str(count),
            "HOROVOD_HOSTNAME": f"host{host}",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(PORT),
            "HOROVOD_SECRET_KEY": secret,
            "HOROVOD_START_TIMEOUT": str(LONGEST_SECONDS),
        }
        command = [*places[host][0], sys.executable, "-c", "import many_ranks; many_ranks.work()"]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    deadline = time.monotonic() + LONGEST_SECONDS
    try:
        said = [each.communicate(timeout=max(1.0, deadline - time.monotonic()))[0] for each in ranks]
    finally:
        for each in ranks:
            if each.poll() is None:
                each.kill()
                each.wait()
    failed = [rank for rank, each in enumerate(ranks) if each.returncode]
    if failed:
        sys.exit(f"ranks {failed} have failed")
    results = [json.loads(text) for text in said]
    return {
        "init_seconds": max(each["ready"] for each in results) - max(each["begun"] for each in results),
        "barrier_seconds": statistics.median(second for each in results for second in each["barriers"]),
        "mebibytes": statistics.mean(each["mebibytes"] for each in results),
        "sockets_first": results[0]["sockets"],
        "sockets_most": max(each["sockets"] for each in results[1:]),
        "sockets_after_alltoall": max(each["sockets_after_alltoall"] for each in results),
        "allreduce_seconds": {
            bytes_: max(each["allreduces"][bytes_] for each in results) for bytes_ in results[0]["allreduces"]
        },
    }


def work() -> None:
    """What each rank does."""
    import numpy as np

    from horovod.comm.datatypes import DataType
    from horovod.comm.reduction import ReduceOp
    from horovod.common import basics
    from horovod.core.requests.tensor import Tensor
    from horovod.core.submission import collectives

    begun = time.monotonic()
    basics.init()
    ready = time.monotonic()
    rank, size = basics.rank(), basics.size()
    for step in range(STEPS):
        arrays = [np.full(1000, rank + index + step, np.float32) for index in range(10)]
        order = range(10) if rank % 2 else range(9, -1, -1)
        handles = []
        for index in order:
            tensor = Tensor(arrays[index], DataType.FLOAT32, (1000,))
            handles.append(collectives.allreduce("allreduce", f"gradient.{index}", [tensor], [tensor], ReduceOp.SUM))
        for handle in handles:
            handle.wait()
        for index, array in enumerate(arrays):
            if not (array == size * (size - 1) / 2 + size * (index + step)).all():
                raise ArithmeticError(f"rank {rank}: gradient {index} of step {step} is wrong: {array[:3]}")
    barriers = []
    for _ in range(BARRIERS):
        started = time.monotonic()
        collectives.barrier().wait()
        barriers.append(time.monotonic() - started)
    allreduces = {}
    for count in ALLREDUCES:
        array = np.ones(count // 4, np.float32)
        tensor, seconds = Tensor(array, DataType.FLOAT32, array.shape), []
        for _ in range(ALLREDUCE_ROUNDS):
            collectives.barrier().wait()
            started = time.monotonic()
            collectives.allreduce("allreduce", f"of {count} bytes", [tensor], [tensor], ReduceOp.SUM).wait()
            seconds.append(time.monotonic() - started)
        allreduces[str(count)] = statistics.median(seconds)
    lines = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    sockets = open_sockets()
    received: list[Any] = []

    def allocate(_: int, rows: int) -> Any:
        received.append(np.empty(rows, np.float32))
        return received[-1]

    array = np.full(size, rank, np.float32)
    sent = Tensor(array, DataType.FLOAT32, (size,))
    collectives.alltoall("alltoall", None, sent, [1] * size, allocate).wait()
    if received[-1].tolist() != list(range(size)):
        raise ArithmeticError(f"rank {rank} got {received[-1]}")
    found = {
        "begun": begun,
        "ready": ready,
        "barriers": barriers,
        "mebibytes": int(lines["Pss"].split()[0]) / 1024,
        "allreduces": allreduces,
        "sockets": sockets,
        "sockets_after_alltoall": open_sockets(),
    }
    collectives.barrier().wait()
    basics.shutdown()
    print(json.dumps(found))


def open_sockets() -> int:
    """How many this process has."""
    links = [str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return sum(link.startswith("socket:") for link in links)


@contextmanager
def hosts(count: int) -> Iterator[list[tuple[list[str], str]]]:
    """By host, what a command on it begins with, and its address. One host is this one."""
    if count == 1:
        yield [([], "127.0.0.1")]
        return
    tag = f"hv{os.getpid() % 10_000}"
    bridge, names = f"{tag}br", [f"{tag}n{index}" for index in range(count)]
    addresses = [f"10.78.{index // 250}.{index % 250 + 1}" for index in range(count)]
    ip("link", "add", bridge, "type", "bridge")
    try:
        ip("link", "set", bridge, "up")
        for index, name in enumerate(names):
            near, far = f"{tag}v{index}", f"{tag}w{index}"
            ip("netns", "add", name)
            ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
            ip("link", "set", near, "master", bridge, "up")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "address", "add", f"{addresses[index]}/16", "dev", far)
            ip("-n", name, "link", "set", far, "up")
        yield [(["ip", "netns", "exec", name], address) for name, address in zip(names, addresses, strict=True)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "link", "delete", bridge], stderr=subprocess.DEVNULL)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--jobs",
        nargs="+",
        type=job,
        default=[(1, 64)],
        help="hosts x ranks of each, as in 16x4; several hosts take root and iproute2",
    )
    parser.add_argument("--json", help="write the figures to this file")
    return parser.parse_args()


def job(text: str) -> tuple[int, int]:
    """A number of hosts and of the ranks of each."""
    count, local = map(int, text.split("x"))
    if count < 1 or local < 1 or count * local < 2:
        raise ValueError(text)
    return count, local


if __name__ == "__main__":
    main()
