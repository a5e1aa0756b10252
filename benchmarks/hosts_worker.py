"""One rank of ``benchmarks/hosts.py``: times allreduces, and one plain socket between two hosts in turn with them."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from workloads import resnet50_parameters

from cluster import plain
from horovod.comm.datatypes import DataType
from horovod.comm.reduction import ReduceOp
from horovod.core.requests.tensor import Tensor
from horovod.core.submission import collectives

SOCKET, WHOLE, RESNET, DIRECTLY = "socket", "whole", "resnet", "directly"


def free_port() -> int:
    """One of rank 0's host, on all ranks."""
    port = np.zeros(1, np.float32)
    if plain.rank() == 0:
        with socket.create_server(("", 0)) as listener:
            port[0] = listener.getsockname()[1]
    return int(plain.allreduce(port, "port")[0])


def plain_sockets(other: int) -> list[socket.socket]:
    """A connection between ranks 0 and ``other`` over each network; none on all others."""
    made = []
    for address in os.environ["RAW_ADDRESSES"].split(","):
        port = free_port()
        listener = socket.create_server((address, port)) if plain.rank() == 0 else None
        plain.allreduce(np.zeros(1, np.float32), "listening")
        if plain.rank() == other:
            made.append(socket.create_connection((address, port)))
        elif listener is not None:
            with listener:
                made.append(listener.accept()[0])
    return made


def both_ways(connections: Sequence[socket.socket], out: memoryview, into: memoryview) -> None:
    """Send and receive at the same time, as an allreduce does; each connection carries the same part."""
    part = -(-len(out) // len(connections))
    threads = []
    for number, connection in enumerate(connections):
        here = slice(number * part, (number + 1) * part)
        threads.append(threading.Thread(target=connection.sendall, args=(out[here],)))
        threads.append(threading.Thread(target=receive, args=(connection, into[here])))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def receive(connection: socket.socket, into: memoryview) -> None:
    place = 0
    while place < len(into):
        place += connection.recv_into(into[place:])


def ours(arrays: Sequence[NDArray[np.float32]], name: str) -> Callable[[], None]:
    """Allreduce these in place, all at once."""
    tensors = [Tensor(array, DataType.FLOAT32, (array.size,)) for array in arrays]

    def call() -> None:
        handles = [
            collectives.allreduce("allreduce", f"{name}.{number}", [each], [each], ReduceOp.SUM)
            for number, each in enumerate(tensors)
        ]
        for handle in handles:
            handle.wait()

    return call


def directly(arrays: Sequence[NDArray[np.float32]]) -> Callable[[], None]:
    """The same by torch.distributed's Gloo."""
    import torch
    from torch import distributed

    tensors = [torch.from_numpy(array) for array in arrays]

    def call() -> None:
        for work in [distributed.all_reduce(each, async_op=True) for each in tensors]:
            work.wait()

    return call


def received() -> int:
    """Bytes that have come to this host."""
    lines = [line.partition(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return sum(int(counts.split()[0]) for name, _, counts in lines if name.strip() != "lo")


def main() -> None:
    size, rounds, other = (int(word) for word in sys.argv[1:4])
    plain.init()
    connections = plain_sockets(other)
    whole = [np.ones(size // 4, np.float32)]
    gradients = [np.ones(length, np.float32) for length in reversed(resnet50_parameters())]
    calls = {WHOLE: ours(whole, WHOLE), RESNET: ours(gradients, RESNET)}
    if DIRECTLY in sys.argv:
        from torch import distributed

        where = f"tcp://{os.environ['RAW_ADDRESSES'].split(',')[0]}:{free_port()}"
        distributed.init_process_group("gloo", init_method=where, rank=plain.rank(), world_size=plain.size())
        calls |= {f"{WHOLE} {DIRECTLY}": directly(whole), f"{RESNET} {DIRECTLY}": directly(gradients)}
    into = np.empty_like(whole[0])
    calls[SOCKET] = lambda: None
    if connections:
        calls[SOCKET] = lambda: both_ways(connections, whole[0].view(np.uint8).data, into.view(np.uint8).data)
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            for each in (*whole, *gradients):
                each.fill(1)  # sums of sums would end as infinity
            plain.allreduce(np.ones(1, np.float32), "mark")
            before, start = received(), time.perf_counter()
            call()
            end = time.perf_counter()
            plain.allreduce(np.ones(1, np.float32), "over")
            if number:  # the first is not counted
                found[name].append((end - start, received() - before))
    for connection in connections:
        connection.close()
    if plain.rank() == 0:
        print(json.dumps(found), flush=True)


main()
