"""Ranks exchange values through Hydra's process management interface, which a small server plays here."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from horovod.control.rendezvous.over_pmi import Client, PMIError
from time_limits import SOON
from unit.control.concurrent_ranks import run_concurrently

SECONDS = SOON
LONGEST_VALUE = 64


class Hydra:
    """Serves ``size`` clients, each at a descriptor of its own, line by line as MPICH's Hydra does."""

    def __init__(self, size: int) -> None:
        self.descriptors: list[int] = []
        self.heard: list[str] = []
        self.values: dict[str, str] = {}
        self.answers = {"init": "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=2"}
        self._barrier = threading.Barrier(size)
        self._sockets: list[socket.socket] = []
        self._threads = []
        for _ in range(size):
            mine, theirs = socket.socketpair()
            self.descriptors.append(theirs.detach())
            self._sockets.append(mine)
            self._threads.append(threading.Thread(target=self._serve, args=(mine,), daemon=True))
            self._threads[-1].start()

    def _serve(self, client: socket.socket) -> None:
        with client, client.makefile("rw") as lines:
            for line in lines:
                self.heard.append(line)
                words = dict(word.split("=", 1) for word in line.split())
                try:
                    lines.write(self._answer(words) + "\n")
                    lines.flush()
                except (OSError, threading.BrokenBarrierError):
                    return

    def _answer(self, words: dict[str, str]) -> str:
        command = words["cmd"]
        if command in self.answers:
            return self.answers[command]
        if command == "get_maxes":
            return f"cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max={LONGEST_VALUE}"
        if command == "get_my_kvsname":
            return "cmd=my_kvsname rc=0 kvsname=kvs_1"
        if command == "put":
            assert len(words["value"]) < LONGEST_VALUE and words["key"] not in self.values
            self.values[words["key"]] = words["value"]
            return "cmd=put_result rc=0"
        if command == "barrier_in":
            self._barrier.wait(SECONDS)
            return "cmd=barrier_out rc=0"
        if command == "get":
            return f"cmd=get_result rc=0 value={self.values[words['key']]}"
        return "cmd=finalize_ack rc=0"

    def close(self) -> None:
        self._barrier.abort()
        for descriptor in self.descriptors:
            os.close(descriptor)
        for thread in self._threads:
            thread.join()


@pytest.fixture
def hydra() -> Iterator[Hydra]:
    server = Hydra(3)
    try:
        yield server
    finally:
        server.close()


def clients(hydra: Hydra) -> list[Client]:
    return [Client(descriptor, time.monotonic() + SECONDS) for descriptor in hydra.descriptors]


def test_values_of_any_length_and_content_reach_all_again_and_again(hydra: Hydra) -> None:
    connected = clients(hydra)
    for values in ([b"", b"x", bytes(range(256)) * 3], [b"a=b c\n", os.urandom(500), b"\0"]):
        calls = [
            lambda rank=rank, value=value: connected[rank].exchange(rank, 3, value, SECONDS)
            for rank, value in enumerate(values)
        ]
        assert run_concurrently(*calls) == [values] * 3
    for client in connected:
        client.finish()
    assert sum(line == "cmd=finalize\n" for line in hydra.heard) == 3


def test_a_rank_that_does_not_come_is_waited_for_only_so_long(hydra: Hydra) -> None:
    connected = clients(hydra)
    with pytest.raises(TimeoutError, match=re.escape("not all 3 ranks called hvd.init() within 0.1 seconds")):
        connected[0].exchange(0, 3, b"x", 0.1)
    for client in connected:
        client.close()


@pytest.mark.parametrize("answer", ["cmd=response_to_init rc=-1 pmi_version=1 pmi_subversion=1", "pmi v2"])
def test_another_protocol_is_an_error_with_the_answer(hydra: Hydra, answer: str) -> None:
    hydra.answers["init"] = answer
    with pytest.raises(PMIError, match=f"answers '{answer}' to 'init'"):
        Client(hydra.descriptors[0], time.monotonic() + SECONDS)


def test_a_descriptor_that_is_no_socket_is_an_error() -> None:
    reader, writer = os.pipe()
    try:
        with pytest.raises(PMIError, match=f"PMI_FD={reader} is not a socket"):
            Client(reader, time.monotonic() + SECONDS)
    finally:
        os.close(reader)
        os.close(writer)
