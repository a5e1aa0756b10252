"""Many real ranks on one machine: whether their results are right, their memory, the time of init() and of a barrier.

    python benchmarks/many_ranks.py --ranks 64                      # one host
    python benchmarks/many_ranks.py --hosts 16 --ranks 64           # 16 hosts of 4 ranks, as root

With ``--hosts`` every host is a network namespace with an address of its own; a bridge joins them. The namespaces are this
program's: it makes and removes them. Each rank is started with variables set by hand (docs/hosts.md). It imports no framework.

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
LONGEST_SECONDS = 300
SOURCE = str(Path(machine.__file__).resolve().parents[1] / "src")
BENCHMARKS = str(Path(__file__).resolve().parent)


def main() -> None:
    options = parse_arguments()
    with hosts(options.hosts) as places:
        found = run(options, places)
    record = {"machine": machine.describe(()), "ranks": options.ranks, "hosts": options.hosts, **found}
    print(machine.in_words(record["machine"]))
    print("| ranks | hosts | init, s | barrier, ms | MiB a rank | connections of rank 0 | of another rank |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    cells = [options.ranks, options.hosts, f"{found['init_seconds']:.1f}", f"{found['barrier_seconds'] * 1000:.1f}"]
    cells += [f"{found['mebibytes']:.0f}", found["sockets_first"], found["sockets_most"]]
    print(f"| {' | '.join(map(str, cells))} |")
    if options.json:
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")


def run(options: argparse.Namespace, places: list[tuple[list[str], str]]) -> dict[str, Any]:
    """Start all ranks, and wait for what they say."""
    local = options.ranks // options.hosts
    address, secret = places[0][1], secrets.token_hex(16)
    ranks = []
    for rank in range(options.ranks):
        host = rank // local
        environment = {
            **os.environ,
            "PYTHONPATH": f"{BENCHMARKS}:{SOURCE}",
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": str(options.ranks),
            "HOROVOD_LOCAL_RANK": str(rank % local),
            "HOROVOD_LOCAL_SIZE": str(local),
            "HOROVOD_CROSS_RANK": str(host),
            "HOROVOD_CROSS_SIZE": str(options.hosts),
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
    lines = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    links = [str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    found = {
        "begun": begun,
        "ready": ready,
        "barriers": barriers,
        "mebibytes": int(lines["Pss"].split()[0]) / 1024,
        "sockets": sum(link.startswith("socket:") for link in links),
    }
    collectives.barrier().wait()
    basics.shutdown()
    print(json.dumps(found))


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
    parser.add_argument("--ranks", type=int, default=64, help="of all hosts")
    parser.add_argument("--hosts", type=int, default=1, help="more than one takes root and iproute2")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    if options.hosts < 1 or options.ranks % options.hosts or options.ranks < 2:
        parser.error("there must be two ranks or more, and as many on each host")
    return options


if __name__ == "__main__":
    main()
