"""Strangers at the ports of a job while it starts and trains: they get nothing, and the job does not notice."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from ranks import RankPool
from time_limits import SOON

Ranks = Callable[..., RankPool]

VISITED_SECONDS = 120.0

GARBAGE = [
    b"",
    b"\0" * 5000,
    b"\xff" * 5000,
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    b"HVD2" + bytes(200),
    bytes(32) + b"\x04\x00" + b"x" * 1024 + bytes(32),
    bytes(32) + b"\x00\x0arendezvous" + bytes(32) + b"\xff\xff\xff\xff" * 10,
    (0xFFFFFFFF).to_bytes(4, "big") + b"x" * 100,
]


class Strangers:
    """Threads that connect to wherever ``addresses()`` says, and send rubbish, or nothing, or what they have recorded."""

    def __init__(self, addresses: Callable[[], list[tuple[str, int] | str]], threads: int = 3) -> None:
        self._addresses = addresses
        self._stop = threading.Event()
        self.visits = 0
        self.answers: set[int] = set()
        self._threads = [threading.Thread(target=self._bother, args=(seed,)) for seed in range(threads)]
        for thread in self._threads:
            thread.start()

    def _bother(self, seed: int) -> None:
        dice = random.Random(seed)
        held: list[socket.socket] = []
        recorded = b""
        while not self._stop.is_set():
            for address in self._addresses():
                try:
                    stranger = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
                    stranger.settimeout(0.2)
                    stranger.connect(address)
                    self.visits += 1
                    stranger.sendall(dice.choice([*GARBAGE, recorded, dice.randbytes(dice.randrange(300))]))
                    if dice.random() < 0.3:
                        recorded = stranger.recv(4096)
                        self.answers.add(len(recorded))
                except OSError:
                    pass
                held.append(stranger)
            while len(held) > 60:  # half-open for a while
                held.pop(0).close()
            self._stop.wait(0.002)
        for stranger in held:
            stranger.close()

    def leave(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(SOON)


def connections(process: psutil.Process, kind: str) -> list[Any]:
    """The sockets of a process. psutil has another name for this before 6.0."""
    found: Any = getattr(process, "net_connections", None) or process.connections
    return list(found(kind))


@contextmanager
def strangers_at(addresses: Callable[[], list[tuple[str, int] | str]]) -> Iterator[Strangers]:
    strangers = Strangers(addresses)
    try:
        yield strangers
    finally:
        strangers.leave()


def train(seconds: float) -> int:
    """One generation after another until the time is over; how many there were."""
    import time

    import torch

    import horovod.torch as hvd

    deadline, generations, more = time.monotonic() + seconds, 0, True
    while more:
        if generations % 2 == int(os.environ["HOROVOD_RANK"]):
            time.sleep(0.05)  # the other listens meanwhile
        hvd.init()
        for n in range(10):
            assert hvd.allreduce(torch.ones(1000 * n), op=hvd.Sum).sum().item() == 1000 * n * hvd.size()
        more = hvd.broadcast_object(time.monotonic() < deadline)
        hvd.shutdown()
        generations += 1
    return generations


def until_visited(strangers: Strangers, run: Callable[[], object]) -> None:
    """Run until strangers have come often enough; a busy machine gives them little time."""
    deadline = time.monotonic() + VISITED_SECONDS
    while strangers.visits <= 20:
        assert time.monotonic() < deadline, f"only {strangers.visits} strangers came"
        run()


def test_hostile_bytes_at_the_rendezvous_do_not_disturb(ranks: Ranks) -> None:
    pool = ranks(2, framework="torch")
    found = pool.run(lambda: (os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]))
    address = found[0][0], int(found[0][1])
    with strangers_at(lambda: [address]) as strangers:
        until_visited(strangers, lambda: pool.run(train, 1.5))
    assert strangers.answers <= {0, 36}  # a greeting, or nothing: never an answer
    with pool.leaves_nothing():
        pool.run(train, 0.0)


def test_hostile_bytes_at_the_ranks_ports_do_not_disturb(ranks: Ranks) -> None:
    """As if every rank were on a host of its own, so that they listen on TCP ports; and on the sockets of one host."""

    def on_hosts_of_their_own() -> None:
        rank = os.environ["HOROVOD_RANK"]
        variables = {
            "LOCAL_RANK": "0",
            "LOCAL_SIZE": "1",
            "CROSS_RANK": rank,
            "CROSS_SIZE": "2",
            "HOSTNAME": f"host{rank}",
        }
        before = {f"HOROVOD_{name}": os.environ[f"HOROVOD_{name}"] for name in variables}
        os.environ.update({f"HOROVOD_{name}": value for name, value in variables.items()})
        try:
            train(1.5)
        finally:
            os.environ.update(before)

    pool = ranks(2, framework="torch")
    processes = [psutil.Process(pid) for pid in pool.run(os.getpid)]

    def listening() -> list[tuple[str, int] | str]:
        found: list[tuple[str, int] | str] = []
        for process in processes:
            ports = [c.laddr.port for c in connections(process, "tcp") if c.status == psutil.CONN_LISTEN]
            names = [str(c.laddr).replace("@", "\0") for c in connections(process, "unix") if "horovod" in str(c.laddr)]
            found += [*(("127.0.0.1", port) for port in ports), *names]
        return found

    with strangers_at(listening) as strangers:
        until_visited(strangers, lambda: [pool.run(on_hosts_of_their_own), pool.run(train, 1.5)])
    with pool.leaves_nothing():
        pool.run(train, 0.0)


def test_a_running_rank_has_no_open_port(ranks: Ranks) -> None:
    def ports() -> list[str]:
        import horovod.torch as hvd

        def listening() -> set[str]:
            return {str(c) for c in connections(psutil.Process(), "all") if c.status == psutil.CONN_LISTEN}

        before = listening()  # what an earlier test of this pool has left to the garbage collector
        hvd.init()
        found = sorted(listening() - before)
        hvd.barrier()
        hvd.shutdown()
        return found

    assert ranks(2, framework="torch").run(ports) == [[], []]
