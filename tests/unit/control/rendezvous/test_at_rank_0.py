"""Exchanging address cards where rank 0 serves by TCP; each rank a thread here."""

from __future__ import annotations

import hashlib
import hmac
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from free_ports import free_port
from horovod.control.rendezvous.at_rank_0 import Directory, KnownAddress, RendezvousAtRank0
from horovod.control.rendezvous.messages import RendezvousError
from horovod.control.rendezvous.server import RendezvousServer
from horovod.control.rendezvous.torchrun_store import TorchrunStore
from time_limits import SOON
from unit.control.concurrent_ranks import ConcurrentCalls, run_concurrently, wait_until
from unit.control.unauthenticated_clients import BAD_CLIENTS, connect, visited_by

SECONDS = SOON
SECRET = b"a secret of the user's"
Making = Callable[[], Directory]


@pytest.fixture
def port() -> int:
    return free_port()


@contextmanager
def torchrun() -> Iterator[int]:
    """A store as torchrun's agents run one; its port."""
    distributed = pytest.importorskip("torch.distributed")
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port


@pytest.fixture(scope="module", autouse=True)
def first_store() -> None:
    """The first one in a process opens a pipe that stays: its library's, for signals."""
    with torchrun():
        pass


@pytest.fixture(params=["known address", "torchrun's store"])
def directory(request: pytest.FixtureRequest, port: int) -> Iterator[Making]:
    """A new directory for each rank, as each rank is a process."""
    if request.param == "known address":
        yield lambda: KnownAddress("localhost", port, "MASTER_ADDR, MASTER_PORT")
        return
    with torchrun() as at:
        yield partial(TorchrunStore, "127.0.0.1", at, "run")


def rank(
    make: Making, number: int, size: int, secret: bytes = b"", seconds: float = SECONDS, members: tuple[int, ...] = ()
) -> Callable[[], tuple[list[bytes], bytes]]:
    """What a rank finds: everybody's values, and the job's secret."""

    def meet() -> tuple[list[bytes], bytes]:
        rendezvous = RendezvousAtRank0(make(), secret)
        return rendezvous.exchange(1, number, size, b"rank %d" % number, seconds, members), rendezvous.secret

    return meet


def everybody(size: int) -> list[bytes]:
    return [b"rank %d" % number for number in range(size)]


@pytest.mark.parametrize("secret", [b"", SECRET], ids=["no secret", "the user's secret"])
def test_ranks_meet_and_have_one_secret(directory: Making, secret: bytes) -> None:
    found = run_concurrently(*(rank(directory, number, 3, secret) for number in range(3)))
    assert [values for values, _ in found] == [everybody(3)] * 3
    (agreed,) = {key for _, key in found}
    assert agreed == secret if secret else len(agreed) == 32


def test_rank_0_may_come_last(directory: Making) -> None:
    early = ConcurrentCalls(rank(directory, 1, 2))
    time.sleep(0.2)
    assert rank(directory, 0, 2)()[0] == everybody(2)
    assert early.results()[0][0] == everybody(2)


def test_ranks_meet_again_and_again(directory: Making) -> None:
    def live(number: int) -> list[list[bytes]]:
        return [rank(directory, number, 2)()[0] for _ in range(5)]

    assert run_concurrently(partial(live, 0), partial(live, 1)) == [[everybody(2)] * 5] * 2


def test_a_rank_that_waits_at_a_rank_0_that_dies_meets_the_next_one(directory: Making) -> None:
    old = directory()
    noted = b"" if old.port else b"of the old rank 0"
    server = RendezvousServer(hmac.digest(b"", b"rendezvous" + noted, hashlib.sha256), "0.0.0.0", old.port)
    server.start()
    old.publish(server.address[1], noted)
    waiting = ConcurrentCalls(rank(directory, 1, 2))
    wait_until(server.exchanges.arrived, "rank 1 waiting at the old rank 0")
    server.stop()
    assert rank(directory, 0, 2)()[0] == everybody(2)
    assert waiting.results()[0][0] == everybody(2)


def test_a_stale_entry_in_the_store_is_passed_over() -> None:
    with torchrun() as at:
        make = partial(TorchrunStore, "127.0.0.1", at, "run")
        make().publish(free_port(), b"of a rank 0 that was killed")
        waiting = ConcurrentCalls(rank(make, 1, 2))
        time.sleep(0.3)
        assert rank(make, 0, 2)()[0] == everybody(2)
        assert waiting.results()[0][0] == everybody(2)


def test_jobs_that_share_a_store_do_not_meet() -> None:
    with torchrun() as at:
        jobs = [partial(TorchrunStore, "127.0.0.1", at, name) for name in ("a", "b")]
        found = run_concurrently(*(rank(job, number, 2) for job in jobs for number in range(2)))
        assert len({secret for _, secret in found}) == 2


def test_an_invalid_entry_in_the_store_is_an_error() -> None:
    with torchrun() as at:
        make = partial(TorchrunStore, "127.0.0.1", at, "run")
        store = pytest.importorskip("torch.distributed").TCPStore("127.0.0.1", at, is_master=False)
        store.set("horovod/run/rank 0", b"\x80\x04K*.")
        store.add("horovod/run/rank 0 published", 1)
        with pytest.raises(RendezvousError, match="not written by this version of Horovod"):
            rank(make, 1, 2)()


def test_without_pytorch_torchruns_ranks_are_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(RendezvousError, match=r"needs PyTorch in this Python.*pip install torch"):
        rank(partial(TorchrunStore, "127.0.0.1", 1, "run"), 1, 2)()


def test_another_secret_is_not_let_in(directory: Making) -> None:
    outcomes = ConcurrentCalls(rank(directory, 0, 2, SECRET, 5.0), rank(directory, 1, 2, b"a guess", 4.0)).outcomes()
    assert "rank 1 of 2 did not call hvd.init()" in str(outcomes[0])
    assert "with the same secret?" in str(outcomes[1])


def test_rank_0_that_never_comes_is_an_error_in_time(directory: Making) -> None:
    with pytest.raises(
        TimeoutError, match=r"rank 0 of this job, at .* \(MASTER_ADDR, MASTER_PORT\).*HOROVOD_START_TIMEOUT"
    ):
        rank(directory, 1, 2, seconds=0.5)()


def test_a_missing_rank_is_named(directory: Making) -> None:
    outcomes = ConcurrentCalls(*(rank(directory, number, 3, seconds=3.0) for number in range(2))).outcomes()
    assert all(isinstance(outcome, TimeoutError) for outcome in outcomes)
    assert "rank 2 of 3 did not call hvd.init()" in str(outcomes[0])


def test_some_of_the_ranks_meet_if_rank_0_is_one_of_them(directory: Making) -> None:
    members = (2, 0)  # renumbered: rank 0 of the launched job is the second
    found = run_concurrently(*(rank(directory, number, 2, members=members) for number in range(2)))
    assert [values for values, _ in found] == [everybody(2)] * 2
    with pytest.raises(RendezvousError, match=r"hvd.init\(comm=\[1, 2\]\) needs rank 0 of the launched job"):
        rank(directory, 0, 2, members=(1, 2))()


def test_a_port_that_is_taken_is_an_error_that_says_what_to_do(port: int) -> None:
    with (
        socket.create_server(("0.0.0.0", port)),
        pytest.raises(RendezvousError, match="HOROVOD_GLOO_RENDEZVOUS_PORT to another port"),
    ):
        rank(lambda: KnownAddress("localhost", port, "MASTER_ADDR, MASTER_PORT"), 0, 2)()


@pytest.mark.parametrize("secret", [b"", SECRET], ids=["no secret", "the user's secret"])
@pytest.mark.parametrize("stranger", list(BAD_CLIENTS))
def test_unauthenticated_clients_at_rank_0_do_not_disturb(stranger: str, secret: bytes, port: int) -> None:
    def make() -> KnownAddress:
        return KnownAddress("127.0.0.1", port, "MASTER_ADDR, MASTER_PORT")

    first = ConcurrentCalls(rank(make, 0, 2, secret))
    wait_until(lambda: _is_served(port), "rank 0 serving")
    with visited_by(stranger, ("127.0.0.1", port)):
        assert rank(make, 1, 2, secret)()[0] == everybody(2)
        assert first.results()[0][0] == everybody(2)


def _is_served(port: int) -> bool:
    try:
        connect(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True
