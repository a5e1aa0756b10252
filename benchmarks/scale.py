"""What rank 0 does in a job of hundreds or thousands of ranks, measured without so many processes.

    python benchmarks/scale.py --ranks 256 1024 4096 --local-ranks 8 4096 --json benchmarks/results/scale.json

Rank 0's side is the real one: its coordinator with a socket for each member, its liveness monitor, its rendezvous server. The
other ranks are simulated (``scale_ranks.py``): real members, many in one process. They move no tensors. What many hosts cost
one rank is measured by ``scale_hosts.py``.

What is measured
    cached      every rank announces ResNet-50's 161 gradients, each by the number that stands for it; in one message, or in 8
    not cached  the same in full, as in the first step or with HOROVOD_CACHE_CAPACITY=0
    alltoall    one alltoall whose splits change in every step
    failure     from the end of one rank's process until the last of all ranks has been told; wall-clock time. Rank 0 and the
                relays have real liveness monitors. The rank is one behind relays, or a relay
    init        the exchange in which every rank tells all others who it is; wall-clock time, the clients included

The ranks are ``--local-ranks`` a host, and relays speak for theirs (:mod:`horovod.core.worker.relay`).

The time of a step is the processor time of rank 0's thread, so that of the simulated ranks is not counted: a step a second
takes the whole of one core. Bytes are those of all members together, divided by members and steps. Memory is what rank 0's
process has grown by.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import secrets
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import machine
import msgspec
from scale_processes import Record, Simulation, apart, fork, shares
from scale_ranks import LONGEST_SECONDS, Step, alltoall, gradients, run_clients, run_members, run_watched
from scale_report import HEAD, RULE, in_a_row

from horovod._base.config import Config
from horovod.control.channel import Channel
from horovod.control.connection import Connection
from horovod.control.failure import Cause
from horovod.control.liveness_monitor import LivenessMonitor
from horovod.control.liveness_tree import LivenessTree
from horovod.control.mesh import Endpoint
from horovod.control.networks import Network
from horovod.control.rendezvous.messages import encode_values
from horovod.control.rendezvous.server import RendezvousServer
from horovod.control.sealing import Message
from horovod.core.engines.device_choice import DeviceReport
from horovod.core.lifecycle.rank_exchange import RankInfo
from horovod.core.negotiation.tree import Tree
from horovod.core.worker.connections import Connections
from horovod.core.worker.coordinator import Coordinator
from horovod.core.worker.cpu_affinity import CpuResources
from horovod.core.worker.role import Schedule


class CountingChannel(Channel):
    """A channel that counts what goes through it."""

    sent = received = 0

    def send(self, body: bytes | Message) -> None:
        CountingChannel.sent += len(body.body if isinstance(body, Message) else body)
        super().send(body)

    def receive(self) -> list[bytes]:
        found = super().receive()
        CountingChannel.received += sum(map(len, found))
        return found


class NoPeers:
    """In place of the liveness monitor, of a coordinator without failures."""

    def __init__(self) -> None:
        self.call_sites: dict[int, str] = {}
        self.thread_lines: dict[int, list[str]] = {}
        self.awaited: dict[int, list[str]] = {}

    def report(self, rank: int, reason: str, suspected: bool = False, cause: Cause | None = None) -> None:
        raise RuntimeError(f"rank {rank} is reported: {reason}")

    def report_no_progress(self, rank: int, reason: str, times: int) -> None:
        raise RuntimeError(f"rank {rank} is reported: {reason}")

    def probe(self) -> None: ...

    def request_dump(self, why: str, reason: str) -> None: ...

    def disagreed(self, reason: str) -> None: ...


def main() -> None:
    options = parse_arguments()
    record = {"machine": machine.describe(()), "measured": []}
    print(machine.in_words(record["machine"]))
    print(HEAD)
    print(RULE)
    for size in options.ranks:
        for local in options.local_ranks:
            what: dict[str, Callable[[], Record]] = {
                "cached": lambda size=size, local=local: negotiation(size, local, gradients(), options, 1024),
                "cached, 8 messages": lambda size=size, local=local: negotiation(
                    size, local, gradients(8), options, 1024
                ),
                "not cached": lambda size=size, local=local: negotiation(size, local, gradients(), options, 0),
                "alltoall": lambda size=size, local=local: negotiation(size, local, alltoall(size), options, 1024),
                "failure": lambda size=size, local=local: failure(size, local, options, relay=False),
                "failure of a relay": lambda size=size, local=local: failure(size, local, options, relay=True),
                "init": lambda size=size: init(size, options),
            }
            for name in options.only or what:
                if name == "init" and local != options.local_ranks[0]:
                    continue  # it is the same: each rank has its own connection, wherever it is
                if name == "failure of a relay" and local >= size:
                    continue  # there is none
                found = {"ranks": size, "local_ranks": local, "what": name, **apart(what[name])}
                record["measured"].append(found)
                print(in_a_row(found), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")


def negotiation(size: int, local_ranks: int, what: Step, options: argparse.Namespace, capacity: int) -> Record:
    """A coordinator that decides all steps of ``size`` ranks."""
    steps = options.steps + 1  # the first defines what the others abbreviate
    tree = Tree([f"host{rank // local_ranks}" for rank in range(size)])
    pairs = {rank: socket.socketpair() for rank in tree.children(0)}
    processes = Simulation(
        pairs, options, lambda mine: run_members({rank: pairs[rank][1] for rank in mine}, tree, what, capacity, steps)
    )
    before = memory()
    connections = Connections({rank: CountingChannel(Connection(pair[0])) for rank, pair in pairs.items()})
    schedule, config = Schedule(), Config(cache_capacity=capacity, stall_check=False, timeout=timedelta(seconds=60))
    coordinator = Coordinator(range(size), connections, schedule, None, config, NoPeers(), "none", tree)
    seconds, grown = [], 0.0
    counted = (0, 0)
    for step in range(steps):
        started = time.thread_time()
        left = Counter(request.name for request in what.requests(0, step))
        for requests in what.parts(0, step):
            coordinator.announce(requests)
        while left:
            ready = connections.poll(LONGEST_SECONDS * 1000)
            if not (ready.readable or ready.writable):
                raise TimeoutError("no announcement arrives")
            for member in ready.writable:
                connections.flush(member)
            for member in ready.readable:
                for body in connections.receive(member):
                    coordinator.receive(member, body)
            coordinator.decide()
            while schedule.batches:
                left -= Counter(decision.name for decision in schedule.batches.popleft())
        coordinator.settled()
        seconds.append(time.thread_time() - started)
        grown = max(grown, memory() - before)
        if step == 0:
            counted = CountingChannel.received, CountingChannel.sent
    connections.flush_all(LONGEST_SECONDS)
    results = processes.results()
    orders = {order for found, _ in results for order in found}
    if len(orders) != 1:
        raise RuntimeError(f"the members have followed {len(orders)} orders")
    connections.close()
    every = (size - 1) * options.steps
    return {
        "milliseconds": statistics.median(seconds[1:]) * 1000,
        "first_milliseconds": seconds[0] * 1000,
        "bytes_to": (CountingChannel.received - counted[0]) / every,
        "bytes_from": (CountingChannel.sent - counted[1]) / every,
        "grown_mib": grown,
        "connections": len(pairs),
        "relay_milliseconds": max(seconds for _, seconds in results) * 1000,
    }


def failure(size: int, local_ranks: int, options: argparse.Namespace, relay: bool) -> Record:
    """Rank 0's liveness monitor, those of the relays, and a rank that ends.

    Args:
        relay: whether that is a relay, where there are any.
    """
    hosts = [range(first, min(first + local_ranks, size)) for first in range(local_ranks, size, local_ranks)]
    tree = LivenessTree(size, hosts)
    lost = size // 2
    if hosts:
        lost = hosts[len(hosts) // 2][0 if relay else -1]
    before = open_sockets()
    pairs = {rank: socket.socketpair() for rank in tree.peers(0)}
    gate = fork.Event()

    def wait(mine: list[int]) -> Any:
        gate.wait(LONGEST_SECONDS)
        return time.monotonic(), run_watched({rank: pairs[rank][1] for rank in mine}, tree, lost)

    processes = Simulation(pairs, options, wait, local_ranks if hosts else 1)
    failed: list[int] = []
    told = threading.Event()

    def on_failure(rank: int, reason: str, cause: Cause) -> None:
        failed.append(rank)
        told.set()

    links = {rank: Channel(Connection(pair[0])) for rank, pair in pairs.items()}
    monitor = LivenessMonitor(0, tree, links, 30, 0, str, lambda rank: None, str, on_failure)
    connections = open_sockets() - before
    monitor.start()
    gate.set()
    if not told.wait(LONGEST_SECONDS):
        raise TimeoutError("rank 0 does not find the failure")
    results = processes.results()
    monitor.leave()
    everybody = failed + [rank for _, found in results for rank, _ in found]
    if everybody != [lost] * (size - 1):
        raise RuntimeError(f"{len(everybody)} ranks were told of {sorted(set(everybody))}")
    started = min(begun for begun, _ in results)
    return {
        "seconds": max(at for _, found in results for _, at in found) - started,
        "connections": connections,
        "relay_connections": max(len(tree.peers(rank)) for rank in range(1, size)),
    }


def rank_info(rank: int) -> RankInfo:
    """What a rank of a cluster tells: two networks, 64 cores."""
    host = f"node{rank // 8:04}.cluster.example"
    addresses = (f"10.0.{rank // 8 // 256}.{rank // 8 % 256}", f"10.1.{rank // 8 // 256}.{rank // 8 % 256}")
    networks = tuple(Network(address, 16, 25_000) for address in addresses)
    endpoint = Endpoint(
        rank, host, 1000 + rank, 40000, addresses, f"\0horovod-{rank}-{'f' * 16}", b"", "p" * 32, networks
    )
    resources = CpuResources(host, list(range(64)), 8)
    return RankInfo(endpoint, rank, 1, [], resources, Config().common(), host, DeviceReport())


def init(size: int, options: argparse.Namespace) -> Record:
    """The rendezvous server, and all ranks as its clients."""
    name = f"\0horovod-scale-{os.getpid()}-{secrets.token_hex(4)}"
    server = RendezvousServer(b"", name=name)
    values = {rank: msgspec.msgpack.encode(rank_info(rank)) for rank in range(size)}
    count = len(shares(range(size), options.processes))
    barrier = fork.Barrier(count)

    def exchange(mine: list[int]) -> Any:
        begun = time.monotonic()
        return begun, run_clients(name, {rank: values[rank] for rank in mine}, size, arrived)

    def arrived() -> None:
        barrier.wait(LONGEST_SECONDS)

    processes = Simulation(dict.fromkeys(range(size)), options, exchange)
    server.start()
    results = processes.results()
    server.stop()
    got = [each for _, found in results for each in found]
    expected = sum(map(len, values.values()))
    if [length for length, _ in got] != [expected] * size:
        raise RuntimeError(f"not all of {size} ranks have all {expected} bytes")
    started = min(begun for begun, _ in results)
    return {
        "seconds": max(at for _, at in got) - started,
        "bytes_from": len(encode_values(list(values.values()))),
        "bytes_to": statistics.mean(map(len, values.values())),
    }


def open_sockets() -> int:
    """How many this process has."""
    descriptors = [each for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return sum(str(each.readlink()).startswith("socket:") for each in descriptors)


def memory() -> float:
    """Of this process, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 512, 1024])
    parser.add_argument(
        "--local-ranks", type=int, nargs="+", default=[8], help="of each host; as many as there are ranks: no relays"
    )
    parser.add_argument("--steps", type=int, default=10, help="that are measured, after the first")
    parser.add_argument("--processes", type=int, default=4, help="of the simulated ranks")
    parser.add_argument("--only", nargs="+", help="the rows to measure, as the table names them")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 4 * max(options.ranks) + 200
    if hard != resource.RLIM_INFINITY and hard < needed:
        parser.error(
            f"{max(options.ranks)} simulated ranks need {needed} descriptors a process, and the limit is {hard}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    return options


if __name__ == "__main__":
    main()
