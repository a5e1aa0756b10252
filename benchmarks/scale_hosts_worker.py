"""One measurement of ``scale_hosts.py``, with the Horovod that PYTHONPATH names: this one, or that of an earlier commit.

It calls only what both have. A handshake is delayed where the connecting side answers, as by a slow network or a busy host.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import select
import selectors
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np

from horovod.comm.reduction import ReduceOp
from horovod.comm.tcp.communicator import TcpCommunicator
from horovod.control.dial import dial_until
from horovod.control.handshake import ClientHandshake
from horovod.control.listener import ConnectionListener
from horovod.control.mesh import ConnectionKey, Endpoint, Mesh
from horovod.control.rendezvous.client import RendezvousClient
from horovod.control.rendezvous.server import RendezvousServer

SECRET = b"s" * 32
LONGEST_SECONDS = 280.0
fork = multiprocessing.get_context("fork")


def allreduce(hosts: int, nbytes: int, calls: int) -> dict[str, float]:
    """Processor time of one rank of ``hosts`` for an allreduce, and the bytes that it sends.

    A process plays all peers: it sends back what it gets. Among a power of two of ranks, what a rank sends a peer in an
    allreduce of equal shards is as long as what it gets from it.
    """
    pairs = [socket.socketpair() for _ in range(hosts - 1)]
    reader, writer = fork.Pipe(duplex=False)
    echo = fork.Process(target=_echo, args=(pairs, writer), daemon=True)
    echo.start()
    for _, far in pairs:
        far.close()
    writer.close()
    sockets = {peer + 1: near for peer, (near, _) in enumerate(pairs)}
    communicator = TcpCommunicator(0, sockets, timedelta(seconds=LONGEST_SECONDS))
    array = np.empty(nbytes // 4, np.float32)
    seconds = []
    for _ in range(calls + 1):  # the first one also makes staging memory
        array.fill(1)
        began = time.thread_time()
        communicator.allreduce([array], [array], ReduceOp.SUM, 1.0, 1.0)
        seconds.append(time.thread_time() - began)
        if not (array == hosts).all():
            raise RuntimeError("the sum is wrong")
    communicator.close()
    sent = reader.recv()
    echo.join()
    return {"milliseconds": statistics.median(seconds[1:]) * 1000, "bytes": sent / (calls + 1)}


def _echo(pairs: Sequence[tuple[socket.socket, socket.socket]], writer: Any) -> None:
    """Send back what arrives, until all connections are closed; then tell how many bytes that was."""
    poll, waiting, count = select.epoll(), {}, 0
    for near, far in pairs:
        near.close()
        far.setblocking(False)
        poll.register(far, select.EPOLLIN)
        waiting[far.fileno()] = far, deque[bytes]()
    left = len(pairs)
    while left:
        for descriptor, event in poll.poll():
            far, queue = waiting[descriptor]
            try:
                if event & select.EPOLLIN and (data := far.recv(1 << 20)):
                    count += len(data)
                    queue.append(data)
                elif not event & select.EPOLLOUT:
                    raise ConnectionError
                while queue:
                    sent = far.send(queue[0])
                    rest = queue.popleft()[sent:]
                    if rest:
                        queue.appendleft(rest)
            except BlockingIOError:
                pass
            except OSError:
                poll.unregister(descriptor)
                left -= 1
                continue
            poll.modify(descriptor, select.EPOLLIN | (select.EPOLLOUT if queue else 0))
    writer.send(count)


def rendezvous(ranks: int, delay: float) -> dict[str, float]:
    """Seconds until ``ranks`` clients, which all connect at once, have what each tells the others."""
    _delay_answers(delay)
    server = RendezvousServer(SECRET, "127.0.0.1")
    server.start()
    address = server.address

    def exchange(rank: int) -> None:
        with RendezvousClient(address, SECRET, LONGEST_SECONDS) as client:
            found = client.exchange("init", rank, ranks, b"v" * 300, LONGEST_SECONDS)
        if len(found) != ranks:
            raise RuntimeError("values are missing")

    began = time.monotonic()
    _in_threads(exchange, range(ranks))
    took = time.monotonic() - began
    server.stop()
    return {"seconds": took}


def mesh(hosts: int, delay: float) -> dict[str, float]:
    """Seconds until ``hosts`` ranks, all of them real, are connected with one another."""
    _delay_answers(delay)
    made = [Mesh(rank, f"host{rank}", True) for rank in range(hosts)]
    endpoints = [each.endpoint for each in made]

    def connect(rank: int) -> None:
        keys = [ConnectionKey(peer, "data", 0) for peer in range(hosts) if peer != rank]
        found = made[rank].connect(endpoints, keys, "1", SECRET, time.monotonic() + LONGEST_SECONDS)
        if len(found) != hosts - 1:
            raise RuntimeError("connections are missing")

    began = time.monotonic()
    _in_threads(connect, range(hosts))
    return {"seconds": time.monotonic() - began}


def one_of(hosts: int, rank: int, delay: float) -> dict[str, float]:
    """Seconds until one real rank is connected with ``hosts`` - 1 simulated ones, which accept at any time."""
    _delay_answers(delay)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    own = Mesh(rank, f"host{rank}", True)
    others = listener.getsockname()[1]
    endpoints = [
        own.endpoint if each == rank else Endpoint(each, f"host{each}", 1, others, ("127.0.0.1",), "")
        for each in range(hosts)
    ]
    gate = fork.Event()
    process = fork.Process(target=_others, args=(listener, own.endpoint.port, rank, hosts, gate), daemon=True)
    process.start()
    listener.close()
    keys = [ConnectionKey(peer, "data", 0) for peer in range(hosts) if peer != rank]
    gate.set()
    began = time.monotonic()
    found = own.connect(endpoints, keys, "1", SECRET, began + LONGEST_SECONDS)
    took = time.monotonic() - began
    process.kill()
    process.join()
    if len(found) != hosts - 1:
        raise RuntimeError("connections are missing")
    return {"seconds": took}


def _others(listener: socket.socket, port: int, rank: int, hosts: int, gate: Any) -> None:
    """The other ranks: one listener stands for the lower ones, and a thread for each higher one."""
    kept: list[Any] = []
    measuring = os.getppid()

    def accept() -> None:
        selector = selectors.DefaultSelector()
        door = ConnectionListener(selector, [listener], SECRET, lambda *connection: kept.append(connection))
        while True:
            for key, events in selector.select(0.1):
                key.data(events)
            door.expire()

    def dial(higher: int) -> None:
        purpose = msgspec.msgpack.encode(["1", higher, "data", 0, 0])
        gate.wait(LONGEST_SECONDS)
        kept.append(dial_until([("127.0.0.1", port)], SECRET, purpose, time.monotonic() + LONGEST_SECONDS))

    threading.Thread(target=accept, daemon=True).start()
    threading.Thread(target=_in_threads, args=(dial, range(rank + 1, hosts)), daemon=True).start()
    while os.getppid() == measuring:  # it may be killed at its limit
        time.sleep(0.1)
    os._exit(0)


def _delay_answers(seconds: float) -> None:
    """Delay every handshake that this process, or a process forked from it, begins."""
    at_once = ClientHandshake.answer

    def late(self: ClientHandshake, greeting: bytes) -> bytes:
        time.sleep(seconds)  # the delay that is measured
        return at_once(self, greeting)

    ClientHandshake.answer = late  # type: ignore[method-assign]  # in this process alone


def _in_threads(run: Callable[[int], None], numbers: Sequence[int]) -> None:
    errors: list[BaseException] = []

    def body(number: int) -> None:
        try:
            run(number)
        except BaseException as error:
            errors.append(error)

    threading.stack_size(256 << 10)
    threads = [threading.Thread(target=body, args=(number,), daemon=True) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONGEST_SECONDS)
    if errors:
        raise errors[0]


if __name__ == "__main__":
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    what, *arguments = json.loads(sys.argv[1])
    measure = {"allreduce": allreduce, "rendezvous": rendezvous, "mesh": mesh, "one of": one_of}[what]
    print(json.dumps(measure(*arguments)), flush=True)
    os._exit(0)  # threads may still wait for connections
