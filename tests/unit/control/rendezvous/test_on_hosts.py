"""Ranks on several hosts meet at a server that rank 0 runs; each rank is a thread here, and MUNGE a stand-in."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import pytest

from free_ports import free_ports
from horovod.control.handshake import MAGIC
from horovod.control.rendezvous import on_hosts as rendezvous_on_hosts
from horovod.control.rendezvous.messages import PURPOSE
from horovod.control.rendezvous.munge import MungeError
from horovod.control.rendezvous.on_hosts import PORTS, RendezvousOnHosts, candidates
from time_limits import SOON
from unit.control.concurrent_ranks import ConcurrentCalls, run_concurrently, wait_until
from unit.control.unauthenticated_clients import BAD_CLIENTS, connect, receive, visited_by

SECONDS = SOON
KEY = b"k" * 32


class StandIn:
    """A MUNGE of whose credentials nobody can tell the contents; one user's are another's refused."""

    sealed: dict[bytes, tuple[str, bytes]]
    user = "me"

    def __init__(self) -> None:
        StandIn.sealed = getattr(StandIn, "sealed", {})

    def seal(self, payload: bytes) -> bytes:
        credential = b"MUNGE:%d:" % len(self.sealed)
        self.sealed[credential] = (self.user, payload)
        return credential

    def open(self, credential: bytes) -> bytes:
        user, payload = self.sealed.get(credential, ("nobody", b""))
        if user != self.user:
            raise MungeError("Invalid credential")
        return payload


@pytest.fixture(autouse=True)
def munge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_on_hosts, "Munge", StandIn)


def rendezvous(job: str, key: bytes = b"", ports: Sequence[int] = (), first: str = "a") -> RendezvousOnHosts:
    return RendezvousOnHosts(job, ("a", "b"), first, ports, key, lambda _: "127.0.0.1")


def ranks(
    make: Callable[[], RendezvousOnHosts], size: int, attempt: int = 1, seconds: float = SECONDS
) -> list[partial[object]]:
    return [partial(make().exchange, attempt, rank, size, b"%d" % rank, seconds) for rank in range(size)]


@pytest.mark.parametrize("key", [b"", KEY], ids=["MUNGE", "a key"])
@pytest.mark.parametrize("size", [2, 5])
def test_all_ranks_meet_and_have_one_new_secret_each_time(key: bytes, size: int) -> None:
    all_ranks = [rendezvous("job 1", key) for _ in range(size)]
    secrets = []
    for attempt in (1, 2):
        found = run_concurrently(
            *(partial(each.exchange, attempt, rank, size, b"%d" % rank, SECONDS) for rank, each in enumerate(all_ranks))
        )
        assert found == [[b"%d" % rank for rank in range(size)]] * size
        (secret,) = {each.secret for each in all_ranks}
        secrets.append(secret)
    assert len(set(secrets)) == 2 and all(len(secret) == 32 and secret != key for secret in secrets)


def test_rank_0_may_come_last() -> None:
    functions = ranks(lambda: rendezvous("late"), 3)
    early = ConcurrentCalls(*functions[1:])
    time.sleep(0.05)
    assert functions[0]() == [b"0", b"1", b"2"]
    early.results()


def test_steps_that_run_at_the_same_time_do_not_meet_each_other() -> None:
    ports = free_ports(2)  # both reserved for both: a port alone does not tell whose meeting is there
    found = run_concurrently(
        *ranks(lambda: rendezvous("1/0", ports=ports), 3), *ranks(lambda: rendezvous("1/1", ports=ports), 2)
    )
    assert found == [[b"0", b"1", b"2"]] * 3 + [[b"0", b"1"]] * 2


def test_a_port_that_is_in_use_is_passed_over() -> None:
    ports = free_ports(2)
    with socket.socket() as other:
        other.bind(("0.0.0.0", ports[0]))
        other.listen()
        assert run_concurrently(*ranks(lambda: rendezvous("busy", ports=ports), 2)) == [[b"0", b"1"]] * 2


def test_no_port_is_free() -> None:
    (port,) = free_ports(1)
    with socket.socket() as other:
        other.bind(("0.0.0.0", port))
        other.listen()
        with pytest.raises(
            RuntimeError, match=f"rank 0 cannot serve .* at any of the ports {port}: Address already in use"
        ):
            ranks(lambda: rendezvous("busy", ports=[port]), 2)[0]()


def test_a_part_of_the_job_meets_where_its_first_rank_is() -> None:
    asked: list[str] = []

    def resolve(host: str) -> str:
        asked.append(host)
        return {"a": "127.0.0.2", "b": "127.0.0.1"}[host]

    def part(rank: int) -> object:
        at = RendezvousOnHosts("part", ("a", "b"), "a", (), KEY, resolve)
        return at.exchange(1, rank, 2, b"%d" % rank, SECONDS, [3, 1])

    assert run_concurrently(partial(part, 0), partial(part, 1)) == [[b"0", b"1"]] * 2
    assert asked == ["a", "b"]


def test_another_users_server_gets_no_rank_and_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)

    class Impostor(StandIn):
        user = "somebody else"

    with monkeypatch.context() as there_only:
        there_only.setattr(rendezvous_on_hosts, "Munge", Impostor)
        theirs = rendezvous("job 1", ports=[port])
    there = ConcurrentCalls(partial(theirs.exchange, 1, 0, 2, b"bait", 3.0))
    dial_when_it_listens(port).close()
    with pytest.raises(TimeoutError, match=r"rank 0 of this job did not call hvd.init\(\).*MUNGE refuses"):
        rendezvous("job 1", ports=[port]).exchange(1, 1, 2, b"mine", 1.5)
    (outcome,) = there.outcomes()
    assert isinstance(outcome, TimeoutError | RuntimeError)


def dial_when_it_listens(port: int) -> socket.socket:
    made: list[socket.socket] = []

    def dialled() -> bool:
        with suppress(ConnectionRefusedError):
            made.append(connect(("127.0.0.1", port)))
        return bool(made)

    wait_until(dialled, "a server")
    return made[0]


def test_a_recorded_credential_opens_no_door() -> None:
    """Who replays a server's first words cannot go on: the handshake needs what is inside of them."""
    (port,) = free_ports(1)
    alone = ConcurrentCalls(partial(rendezvous("x", ports=[port]).exchange, 1, 0, 2, b"early", 1.0))
    with dial_when_it_listens(port) as recorder:
        recorded = receive(recorder, 4 + 2)
        recorded += receive(recorder, int.from_bytes(recorded[-2:], "big"))
    alone.outcomes()
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind(("127.0.0.1", port))
        thief.listen()

        def replay() -> bytes:
            connection, _ = thief.accept()
            with connection:
                connection.sendall(recorded + MAGIC + b"n" * 32)
                proof = connection.recv(1000)
                connection.sendall(b"p" * 32)
                return proof + connection.recv(1000)

        there = ConcurrentCalls(replay)
        with pytest.raises(TimeoutError, match="did not call"):
            rendezvous("x", ports=[port]).exchange(1, 1, 2, b"mine", 0.5)
        (heard,) = there.results()
        assert len(heard) == 32 + 2 + len(PURPOSE) + 32 and b"mine" not in heard


@pytest.mark.parametrize(
    "words",
    [b"", b"HVDS", b"HVDS\xff\xff" + b"x" * 5000, b"GET / HTTP/1.1\r\n\r\n", b"HVDS\0\4abcd", b"HVD2" + b"\0" * 40],
)
def test_what_answers_otherwise_is_not_the_meeting(words: bytes) -> None:
    (port,) = free_ports(1)
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(words)

        there = ConcurrentCalls(answer)
        with pytest.raises(TimeoutError, match="did not call"):
            rendezvous("x", ports=[port]).exchange(1, 1, 2, b"mine", 0.3)
        there.results()


@pytest.mark.parametrize(
    ("stranger", "key"),
    [
        (name, key)
        for name in BAD_CLIENTS
        for key in (b"", KEY)
        if name != "closed_at_once" and (key or name != "wrong_secret")  # which would have to get past MUNGE first
    ],
)
def test_unauthenticated_clients_at_the_rendezvous_do_not_disturb(stranger: str, key: bytes) -> None:
    ports = free_ports(1)
    functions = ranks(lambda: rendezvous(f"visited {stranger}", key, ports), 2)
    first = ConcurrentCalls(functions[0])
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", ports[0]), 1).close()
            break
        except OSError:
            assert time.monotonic() < deadline
    with visited_by(stranger, ("127.0.0.1", ports[0])):
        assert functions[1]() == [b"0", b"1"]
    assert first.results() == [[b"0", b"1"]]


def test_a_rank_with_another_key_is_not_let_in() -> None:
    ports = free_ports(1)
    first = ConcurrentCalls(*ranks(lambda: rendezvous("x", KEY, ports), 2, seconds=6.0)[:1])
    with pytest.raises(TimeoutError, match=r"with the same secret\?|no answer in time"):
        ranks(lambda: rendezvous("x", b"z" * 32, ports), 2, seconds=4.0)[1]()
    assert isinstance(first.outcomes()[0], TimeoutError)


def test_ports_follow_from_the_name_alone() -> None:
    assert candidates("a") == candidates("a") != candidates("b")
    for name in map(str, range(200)):
        ports = candidates(name)
        assert len(set(ports)) == len(ports) and set(ports) <= set(PORTS)
