"""The exchange at the launcher's server, or where rank 0 runs one for a moment; each rank is a thread here."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from functools import partial

import pytest

from horovod._base.abstract_names import listed
from horovod.control import connection as connection_module
from horovod.control import dial as dial_module
from horovod.control.dial import dial
from horovod.control.rendezvous.messages import PURPOSE, RendezvousError
from horovod.control.rendezvous.rendezvous_kinds import LauncherServer, OnThisHost, Rendezvous
from horovod.control.rendezvous.server import RendezvousServer
from time_limits import SOON
from unit.control.concurrent_ranks import ConcurrentCalls, run_concurrently, wait_until
from unit.control.unauthenticated_clients import BAD_CLIENTS, visited_by

SECONDS = SOON


def rendezvous(name: str = "job") -> OnThisHost:
    return OnThisHost.of_job(f"test {os.getpid()} {name}")


def ranks(at: Rendezvous, size: int, generation: int = 1, seconds: float = SECONDS) -> list[Callable[[], object]]:
    return [
        partial(at.exchange, generation, rank, size, b"%d/%d" % (rank, generation), seconds) for rank in range(size)
    ]


def expected(size: int, generation: int = 1) -> list[list[bytes]]:
    return [[b"%d/%d" % (rank, generation) for rank in range(size)]] * size


@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranks_of_one_host_meet_where_rank_0_serves(size: int) -> None:
    assert run_concurrently(*ranks(rendezvous(), size)) == expected(size)


def test_rank_0_may_come_last() -> None:
    functions = ranks(rendezvous(), 3)
    early = ConcurrentCalls(*functions[1:])
    time.sleep(0.05)
    assert functions[0]() == expected(3)[0]
    assert early.results() == expected(3)[1:]


def test_generation_after_generation() -> None:
    def live(rank: int) -> list[object]:
        return [rendezvous().exchange(turn, rank, 3, b"%d/%d" % (rank, turn), SECONDS) for turn in range(1, 15)]

    found = run_concurrently(*(partial(live, rank) for rank in range(3)))
    assert found == [[expected(3, turn)[0] for turn in range(1, 15)]] * 3


def test_two_jobs_side_by_side() -> None:
    found = run_concurrently(*ranks(rendezvous("a"), 3), *ranks(rendezvous("b"), 2))
    assert found == expected(3) + expected(2)


def test_jobs_and_users_have_separate_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = OnThisHost.of_job("x")
    assert ours == OnThisHost.of_job("x")
    assert ours.name != OnThisHost.of_job("y").name
    monkeypatch.setattr(os, "getuid", lambda: 1 << 20)
    assert ours.name != OnThisHost.of_job("x").name


def test_the_name_of_a_rendezvous_does_not_tell_the_job() -> None:
    name = OnThisHost.of_job("confidential").name
    assert name.startswith("horovod-")
    assert "confidential" not in name


def test_a_socket_of_the_same_name_that_another_user_has_bound_keeps_no_rank_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stands first in the list; nothing is said to it."""
    at = rendezvous("taken")
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind(f"\0{at.name}-1.{'0' * 16}")
        squatter.listen()
        theirs = connection_module.is_same_user

        def is_same_user(connection: socket.socket) -> bool:
            return connection.getpeername() != squatter.getsockname() and theirs(connection)

        monkeypatch.setattr(dial_module, "is_same_user", is_same_user)
        assert run_concurrently(*ranks(at, 2)) == expected(2)
        squatter.setblocking(False)
        heard, _ = squatter.accept()
        with heard:
            assert heard.recv(100) == b""


def test_a_missing_rank_is_named() -> None:
    outcomes = ConcurrentCalls(*ranks(rendezvous(), 3, seconds=0.3)[:2]).outcomes()
    assert type(outcomes[0]) is TimeoutError
    assert "rank 2 of 3 did not call hvd.init()" in str(outcomes[0])
    assert isinstance(outcomes[1], TimeoutError | RendezvousError)


def test_after_a_failure_the_address_is_free_again() -> None:
    with pytest.raises(TimeoutError):
        ranks(rendezvous(), 2, seconds=0.1)[0]()
    assert run_concurrently(*ranks(rendezvous(), 2)) == expected(2)


def test_rank_0_that_never_comes_is_an_error_in_time() -> None:
    with pytest.raises(TimeoutError, match="rank 0 of this job did not call"):
        rendezvous().exchange(1, 1, 2, b"", 0.1)


def test_the_launchers_server_serves_generation_after_generation() -> None:
    server = RendezvousServer(b"secret")
    server.start()
    try:
        at = LauncherServer(server.address, b"secret")
        for generation in (1, 2, 3):
            assert run_concurrently(*ranks(at, 3, generation)) == expected(3, generation)
        wait_until(lambda: not server.connected(), "all leaving")
        assert not server.exchanges.arrived()
    finally:
        server.stop()


@pytest.mark.parametrize("stranger", [name for name in BAD_CLIENTS if name != "closed_at_once"])
def test_unauthenticated_clients_at_the_socket_do_not_disturb(stranger: str) -> None:
    at = rendezvous(stranger)
    functions = ranks(at, 2)
    first = ConcurrentCalls(functions[0])
    wait_until(lambda: listed(f"{at.name}-1"), "rank 0 serving")
    with visited_by(stranger, *listed(f"{at.name}-1")):
        assert functions[1]() == expected(2)[0]
        assert first.results() == expected(2)[:1]


def test_another_process_of_the_user_that_connects_and_leaves_delays_no_rank() -> None:
    at = rendezvous("guest")
    functions = ranks(at, 2, seconds=1.0)
    first = ConcurrentCalls(functions[0])
    wait_until(lambda: listed(f"{at.name}-1"), "rank 0 serving")
    with dial(*listed(f"{at.name}-1"), b"", PURPOSE, time.monotonic() + SECONDS):
        assert functions[1]() == expected(2)[0]
        assert first.results() == expected(2)[:1]
