"""One rank of ``benchmarks/hosts.py``: times allreduces, and one plain socket between two hosts in turn with them."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time

import numpy as np

from cluster import plain


def raw_socket(rank: int, other: int) -> socket.socket | None:
    """A connection between ranks 0 and ``other``; None on all others."""
    port = np.zeros(1, np.float32)
    listener = None
    if rank == 0:
        listener = socket.create_server(("", 0))
        port[0] = listener.getsockname()[1]
    port = plain.allreduce(port, "port")
    if rank == other:
        return socket.create_connection((os.environ["RAW_ADDRESS"], int(port[0])))
    if listener is None:
        return None
    with listener:
        return listener.accept()[0]


def both_ways(connection: socket.socket, out: memoryview, into: memoryview) -> None:
    """Send and receive at the same time, as an allreduce does."""
    sender = threading.Thread(target=connection.sendall, args=(out,))
    sender.start()
    place = 0
    while place < len(into):
        place += connection.recv_into(into[place:])
    sender.join()


def main() -> None:
    size, rounds, other = (int(word) for word in sys.argv[1:])
    plain.init()
    rank = plain.rank()
    connection = raw_socket(rank, other)
    data = np.ones(size // 4, np.float32)
    into = np.empty_like(data)
    mark = np.ones(1, np.float32)
    raw, ours = [], []
    for number in range(rounds + 1):
        plain.allreduce(mark, "mark")
        start = time.perf_counter()
        if connection is not None:
            both_ways(connection, data.view(np.uint8).data, into.view(np.uint8).data)
        middle = time.perf_counter()
        plain.allreduce(mark, "mark")
        begin = time.perf_counter()
        plain.allreduce(data, "data")
        end = time.perf_counter()
        if number:  # the first is not counted
            raw.append(middle - start)
            ours.append(end - begin)
    if connection is not None:
        connection.close()
    if rank == 0:
        print(json.dumps({"raw": raw, "ours": ours}), flush=True)


main()
