"""How the compute job and the training job find each other: a real service on loopback, clients in threads, and strangers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from horovod.control.dial import dial
from horovod.control.rendezvous import server as server_module
from horovod.control.rendezvous.messages import PURPOSE, Get, Request, decode_request
from horovod.control.rendezvous.server import RendezvousServer
from horovod.control.secret import make_secret
from horovod.runner import compute_service
from horovod.runner.common.service.compute_service import Addresses, ComputeClient, ComputeService
from horovod.runner.common.util.timeout import TimeoutException
from time_limits import SOON
from unit.control.concurrent_ranks import ConcurrentCalls, run_concurrently, wait_until
from unit.control.unauthenticated_clients import BAD_CLIENTS, visited_by

KEY = make_secret()
SECONDS = SOON


@pytest.fixture
def service() -> Iterator[ComputeService]:
    """Two dispatchers with three workers each."""
    with ComputeService(2, 3, KEY, nics={"lo"}) as made:
        yield made


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[RendezvousServer]:
    """Those of the services that the test makes."""
    made: list[RendezvousServer] = []

    def make(*arguments: Any) -> RendezvousServer:
        made.append(RendezvousServer(*arguments))
        return made[-1]

    monkeypatch.setattr(compute_service, "RendezvousServer", make)
    return made


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_service, "CONNECT_SECONDS", 0.2)


def client(service: ComputeService) -> ComputeClient:
    return ComputeClient(service.addresses(), KEY)


def first_address(addresses: Addresses) -> tuple[str, int]:
    ((address,),) = addresses.values()
    return address


def test_clients_find_a_dispatcher_that_registers_before_or_after_them(service: ComputeService) -> None:
    waiting = ConcurrentCalls(*[partial(client(service).wait_for_dispatcher_registration, 1, SECONDS)] * 2)
    client(service).register_dispatcher(1, "grpc://localhost:1")
    assert waiting.results() == ["grpc://localhost:1"] * 2
    assert client(service).wait_for_dispatcher_registration(1, SECONDS) == "grpc://localhost:1"


def test_a_dispatcher_has_one_address(service: ComputeService) -> None:
    one = client(service)
    one.register_dispatcher(0, "grpc://localhost:1")
    one.register_dispatcher(0, "grpc://localhost:1")
    one.register_dispatcher(1, "grpc://localhost:2")
    with pytest.raises(ValueError, match="dispatcher 0 is registered at grpc://localhost:1 already, not at grpc://x:3"):
        one.register_dispatcher(0, "grpc://x:3")
    assert one.wait_for_dispatcher_registration(0, SECONDS) == "grpc://localhost:1"


@pytest.mark.parametrize("ids", [[0, 1, 2], [3, 4, 5], [5, 0, 3]])
def test_workers_are_waited_for_until_all_are_there(service: ComputeService, ids: list[int]) -> None:
    waiting = ConcurrentCalls(partial(client(service).wait_for_dispatcher_worker_registration, 1, SECONDS))
    one = client(service)
    for worker in (ids[0], ids[1], ids[0]):
        one.register_worker_for_dispatcher(1, worker)
    with pytest.raises(TimeoutException, match=r"dispatcher 1 did not have its 3 workers within 0\.1 seconds"):
        one.wait_for_dispatcher_worker_registration(1, 0.1)
    one.register_worker_for_dispatcher(1, ids[2])
    assert waiting.results() == [None]
    with pytest.raises(TimeoutException, match="dispatcher 0 did not have"):
        one.wait_for_dispatcher_worker_registration(0, 0.0)


def test_workers_that_come_at_the_same_moment_all_count(service: ComputeService) -> None:
    run_concurrently(*[partial(client(service).register_worker_for_dispatcher, 0, worker) for worker in (0, 3, 1)])
    client(service).wait_for_dispatcher_worker_registration(0, SECONDS)
    with pytest.raises(ValueError, match="worker 2 cannot serve dispatcher 0, which has all its 3 workers"):
        client(service).register_worker_for_dispatcher(0, 2)
    client(service).register_worker_for_dispatcher(0, 3)


@pytest.mark.parametrize("wrong", [-1, 2, 100])
def test_a_dispatcher_that_does_not_exist(service: ComputeService, wrong: int) -> None:
    one = client(service)
    for call in (
        lambda: one.register_dispatcher(wrong, "grpc://localhost:1"),
        lambda: one.wait_for_dispatcher_registration(wrong, 0.1),
        lambda: one.register_worker_for_dispatcher(wrong, 0),
        lambda: one.wait_for_dispatcher_worker_registration(wrong, 0.1),
    ):
        with pytest.raises(IndexError, match=f"dispatcher {wrong} does not exist: their numbers are 0 to 1"):
            call()
    for worker in (-1, 6):
        with pytest.raises(IndexError, match=f"worker {worker} does not exist: their numbers are 0 to 5"):
            one.register_worker_for_dispatcher(0, worker)


def test_numbers_below_one() -> None:
    for dispatchers, workers in ((0, 1), (1, 0), (-1, 1)):
        with pytest.raises(ValueError, match="at least 1 is needed"):
            ComputeService(dispatchers, workers, KEY)
    with pytest.raises(ValueError, match="no network interface 'nowhere0'"):
        ComputeService(1, 1, KEY, nics=["nowhere0"])


def test_a_dispatcher_that_does_not_come(service: ComputeService) -> None:
    with pytest.raises(TimeoutException, match=r"dispatcher 0 did not register within 0\.05 seconds") as caught:
        client(service).wait_for_dispatcher_registration(0, 0.05)
    assert isinstance(caught.value, TimeoutError)


def test_all_hear_of_the_end(service: ComputeService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_service, "_SHUTDOWN_POLL_SECONDS", 0.02)  # they ask again and again
    waiting = ConcurrentCalls(*[client(service).wait_for_shutdown] * 3)
    client(service).register_dispatcher(0, "grpc://localhost:1")
    client(service).shutdown()
    assert waiting.results() == [None] * 3
    client(service).shutdown()
    client(service).wait_for_shutdown()


@pytest.mark.usefixtures("impatient")
def test_waiting_clients_are_told_of_the_end_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Request] = []

    def decode(body: bytes) -> Request:
        asked.append(decode_request(body))
        return asked[-1]

    monkeypatch.setattr(server_module, "decode_request", decode)
    service = ComputeService(1, 1, KEY, nics="lo")
    waiting = ConcurrentCalls(*[client(service).wait_for_shutdown] * 4)
    # Until all wait, so that none comes to a closed door.
    wait_until(lambda: sum(isinstance(each, Get) for each in asked) == 4, "all waiting")
    client(service).register_dispatcher(0, "grpc://localhost:1")
    service.shutdown()
    service.shutdown()
    assert waiting.results() == [None] * 4
    with pytest.raises(ConnectionError, match=r"cannot be reached, or has ended: .*Does the compute job still run"):
        client(service).register_dispatcher(0, "grpc://localhost:1")


@pytest.mark.usefixtures("impatient")
def test_a_service_that_vanished(servers: list[RendezvousServer]) -> None:
    service = ComputeService(2, 3, KEY, nics={"lo"})
    (server,) = servers
    one = client(service)
    one.register_dispatcher(0, "grpc://localhost:1")
    waiting = ConcurrentCalls(one.wait_for_shutdown)
    server.stop()
    (outcome,) = waiting.outcomes()
    assert isinstance(outcome, ConnectionError) and "has ended" in str(outcome)
    with pytest.raises(ConnectionError):
        service.shutdown()
    service.shutdown()


@pytest.mark.usefixtures("impatient")
def test_another_key_opens_nothing(service: ComputeService) -> None:
    stranger = ComputeClient(service.addresses(), make_secret())
    with pytest.raises(ConnectionError, match="closed the connection on seeing our proof") as caught:
        stranger.register_dispatcher(0, "grpc://evil:1")
    assert KEY.hex() not in str(caught.value)
    with pytest.raises(TimeoutException):
        client(service).wait_for_dispatcher_registration(0, 0.0)


@pytest.mark.parametrize("stranger", BAD_CLIENTS)
def test_unauthenticated_clients_do_not_disturb(service: ComputeService, stranger: str) -> None:
    with visited_by(stranger, first_address(service.addresses())):
        client(service).register_dispatcher(0, "grpc://localhost:1")
        assert client(service).wait_for_dispatcher_registration(0, SECONDS) == "grpc://localhost:1"
        client(service).shutdown()
        client(service).wait_for_shutdown()


@pytest.mark.parametrize("rubbish", [b"\x80\x04N.", b""], ids=["pickle", "empty"])
def test_invalid_messages_with_the_key_end_only_their_connection(service: ComputeService, rubbish: bytes) -> None:
    waiting = ConcurrentCalls(partial(client(service).wait_for_dispatcher_registration, 0, SECONDS))
    with dial(first_address(service.addresses()), KEY, PURPOSE, time.monotonic() + SECONDS) as connection:
        connection.send(rubbish, time.monotonic() + SECONDS)
        try:
            assert connection.socket.recv(100) == b""
        except ConnectionResetError:
            pass
    client(service).register_dispatcher(0, "grpc://localhost:1")
    assert waiting.results() == ["grpc://localhost:1"]


def test_addresses_are_of_the_interfaces_asked_for(servers: list[RendezvousServer]) -> None:
    with ComputeService(1, 1, KEY, nics=["lo"]) as service:
        assert [host for host, _ in service.addresses()["lo"]] == ["127.0.0.1"]
        assert servers[0].address == first_address(service.addresses())
        assert client(service).own_address() == "127.0.0.1"
    with ComputeService(1, 1, KEY) as service:
        everywhere = [host for entries in service.addresses().values() for host, _ in entries]
        assert everywhere and (everywhere == ["127.0.0.1"] or "127.0.0.1" not in everywhere)
        assert client(service).own_address() in everywhere


def test_a_wrong_address_among_others_is_passed_over(service: ComputeService) -> None:
    host, port = first_address(service.addresses())
    one = ComputeClient({"eth9": [("127.0.0.1", 9)], "lo": [(host, port)]}, KEY)
    one.register_dispatcher(0, "grpc://localhost:1")


def test_calls_are_logged_where_that_is_wished(service: ComputeService, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[Callable[[ComputeClient], Any]] = [
        lambda one: one.register_dispatcher(0, "grpc://localhost:1"),
        lambda one: one.register_worker_for_dispatcher(0, 1),
    ]
    with caplog.at_level("INFO", "horovod.compute_service"):
        for call in calls:
            call(ComputeClient(service.addresses(), KEY, verbose=1))
        assert not caplog.messages
        for call in calls:
            call(ComputeClient(service.addresses(), KEY, verbose=2))
    assert caplog.messages == ["dispatcher 0 is at grpc://localhost:1", "worker 1 serves dispatcher 0"]
