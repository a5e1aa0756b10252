"""Ranks find and connect to each other, each rank a thread here, with strangers on every port."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from ipaddress import IPv4Interface
from types import SimpleNamespace

import psutil
import pytest

from horovod.control.connection import Connection
from horovod.control.dial import dial
from horovod.control.mesh import ConnectionKey, Endpoint, LostPeerError, Mesh, MeshError, by_nearness, own_addresses
from horovod.control.networks import networks_of
from time_limits import SOON
from unit.control.concurrent_ranks import ConcurrentCalls, run_concurrently
from unit.control.unauthenticated_clients import BAD_CLIENTS, Recorder, connect, receive, visited_by

SECRET = b"s" * 32
Made = dict[ConnectionKey, Connection]


def soon(seconds: float = SOON) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def meshes() -> Iterator[Callable[..., list[Mesh]]]:
    """``meshes(size)``: one switchboard a rank, closed at the end."""
    with ExitStack() as stack:

        def make(size: int, hosts: Sequence[str] | None = None) -> list[Mesh]:
            made = [Mesh(rank, hosts[rank] if hosts else "host", True) for rank in range(size)]
            for board in made:
                stack.callback(board.close)
            return made

        yield make


def endpoints_of(meshes: Sequence[Mesh]) -> list[Endpoint]:
    return [board.endpoint for board in meshes]


def mesh(rank: int, size: int, role: str = "data", group: int = 0) -> list[ConnectionKey]:
    return [ConnectionKey(peer, role, group) for peer in range(size) if peer != rank]


def connect_all(meshes: Sequence[Mesh], generation: str = "1", role: str = "data") -> list[Made]:
    size, endpoints, deadline = len(meshes), endpoints_of(meshes), soon()
    return run_concurrently(
        *(
            partial(board.connect, endpoints, mesh(rank, size, role), generation, SECRET, deadline)
            for rank, board in enumerate(meshes)
        )
    )


def assert_connected(made: Sequence[Made]) -> None:
    """Each wire leads to the rank it names, and closes them all."""
    for rank, keys in enumerate(made):
        for key, connection in keys.items():
            connection.socket.settimeout(SOON)
            connection.socket.sendall(b"%d to %d in %s" % (rank, key.peer, key.role.encode()))
    for rank, keys in enumerate(made):
        for key, connection in keys.items():
            expected = b"%d to %d in %s" % (key.peer, rank, key.role.encode())
            assert receive(connection.socket, len(expected)) == expected
    close(made)


def close(made: Sequence[Made]) -> None:
    for keys in made:
        for connection in keys.values():
            connection.close()


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_every_wire_leads_to_the_rank_it_names(meshes: Callable[..., list[Mesh]], size: int) -> None:
    made = connect_all(meshes(size))
    assert [sorted(keys) for keys in made] == [sorted(mesh(rank, size)) for rank in range(size)]
    for keys in made:
        for connection in keys.values():
            assert connection.socket.getblocking()
    assert_connected(made)


def test_ranks_of_one_host_meet_on_the_socket_that_passes_descriptors(
    meshes: Callable[..., list[Mesh]],
) -> None:
    made = connect_all(meshes(3))
    assert {connection.socket.family for keys in made for connection in keys.values()} == {socket.AF_UNIX}
    assert_connected(made)


def test_ranks_of_different_hosts_meet_over_tcp(meshes: Callable[..., list[Mesh]]) -> None:
    made = connect_all(meshes(3, ["a", "b", "b"]))
    assert made[0][ConnectionKey(1, "data", 0)].socket.family == socket.AF_INET
    assert made[1][ConnectionKey(2, "data", 0)].socket.family == socket.AF_UNIX
    assert_connected(made)


def test_several_roles_and_groups_between_the_same_two_ranks(meshes: Callable[..., list[Mesh]]) -> None:
    first, second = meshes(2)
    endpoints = endpoints_of([first, second])

    def keys(peer: int) -> list[ConnectionKey]:
        return [ConnectionKey(peer, role, group) for role in ("control", "data") for group in (0, 7)]

    made = run_concurrently(
        lambda: first.connect(endpoints, keys(1), "1", SECRET, soon()),
        lambda: second.connect(endpoints, keys(0), "1", SECRET, soon()),
    )
    for key, connection in made[0].items():
        connection.socket.sendall(f"{key.role} {key.group}".ljust(12).encode())
    for key, connection in made[1].items():
        connection.socket.settimeout(SOON)
        assert receive(connection.socket, 12).decode() == f"{key.role} {key.group}".ljust(12)
    close(made)


def test_round_after_round_on_one_switchboard(meshes: Callable[..., list[Mesh]]) -> None:
    some = meshes(3)
    assert_connected(connect_all(some, role="control"))
    assert_connected(connect_all(some, role="data"))
    assert_connected(connect_all(some, generation="2", role="data"))


def test_a_mesh_of_one_connects_to_no_rank(meshes: Callable[..., list[Mesh]]) -> None:
    (board,) = meshes(1)
    assert board.connect([board.endpoint], [], "1", SECRET, soon()) == {}


def test_a_rank_that_does_not_come_is_named(meshes: Callable[..., list[Mesh]]) -> None:
    some = meshes(3)
    endpoints = endpoints_of(some)
    outcomes = ConcurrentCalls(
        *(partial(some[rank].connect, endpoints, mesh(rank, 3), "1", SECRET, soon(0.3)) for rank in (0, 1))
    ).outcomes()
    assert [type(outcome) for outcome in outcomes] == [LostPeerError, LostPeerError]
    for rank, outcome in enumerate(outcomes):
        assert str(outcome).startswith(f"lost rank 2 while rank {rank} waited for connections: ranks [2] did not")


def test_a_rank_that_cannot_be_reached_is_named_with_its_addresses(
    meshes: Callable[..., list[Mesh]],
) -> None:
    first, second = meshes(2)
    endpoints = endpoints_of([first, second])
    first.close()
    with pytest.raises(MeshError) as caught:
        second.connect(endpoints, mesh(1, 2), "1", SECRET, soon(0.1))
    text = str(caught.value)
    assert text.startswith("lost rank 0 while rank 1 connected to it on host: ")
    assert f"127.0.0.1:{endpoints[0].port}" in text
    assert endpoints[0].name.replace("\0", "@") in text


def test_a_failure_closes_what_was_made_before_it(meshes: Callable[..., list[Mesh]]) -> None:
    some = meshes(3)
    endpoints = endpoints_of(some)
    pair = ConcurrentCalls(
        partial(some[0].connect, endpoints, [ConnectionKey(1, "data", 0)], "1", SECRET, soon()),
        partial(some[1].connect, endpoints, mesh(1, 3), "1", SECRET, soon(0.3)),
    )
    made, error = pair.outcomes()
    assert isinstance(error, MeshError)
    ((_, connection),) = made.items()
    connection.socket.settimeout(SOON)
    assert connection.socket.recv(1) == b""  # rank 1 gave it up with the rest
    connection.close()


def test_a_peer_that_is_a_round_ahead_is_kept_for_the_next_round(meshes: Callable[..., list[Mesh]]) -> None:
    """Rank 2 already dials for data while rank 0 still waits for rank 1's control connection."""
    first, second, third = meshes(3)
    endpoints = endpoints_of([first, second, third])
    control = ConcurrentCalls(
        lambda: first.connect(
            endpoints, [ConnectionKey(1, "control", 0), ConnectionKey(2, "control", 0)], "1", SECRET, soon()
        )
    )
    at_third = third.connect(endpoints, [ConnectionKey(0, "control", 0)], "1", SECRET, soon())
    at_once = third.connect(endpoints, [ConnectionKey(0, "data", 5)], "1", SECRET, soon())  # rank 0 has accepted it
    made = second.connect(endpoints, [ConnectionKey(0, "control", 0)], "1", SECRET, soon())
    (at_first,) = control.results()
    data = first.connect(endpoints, [ConnectionKey(2, "data", 5)], "1", SECRET, soon())
    first.close()  # closes what is kept for a later round
    assert_connected([at_first, made, at_third])
    assert_connected([data, {}, at_once])


def test_every_rank_accepts_while_it_dials(meshes: Callable[..., list[Mesh]]) -> None:
    """Rank 1 cannot reach rank 0 yet, and rank 2 need not wait for that."""
    first, second, third = meshes(3)
    endpoints = endpoints_of([first, second, third])
    middle = ConcurrentCalls(lambda: second.connect(endpoints, mesh(1, 3), "1", SECRET, soon()))
    at_third = third.connect(endpoints, [ConnectionKey(1, "data", 0)], "1", SECRET, soon())
    at_first = first.connect(endpoints, [ConnectionKey(1, "data", 0)], "1", SECRET, soon())
    (at_second,) = middle.results()
    assert_connected([at_first, at_second, at_third])


def test_unrequested_connections_are_closed(meshes: Callable[..., list[Mesh]]) -> None:
    first, second, third = meshes(3)
    endpoints = endpoints_of([first, second, third])
    waiting = ConcurrentCalls(lambda: first.connect(endpoints, [ConnectionKey(2, "control", 0)], "1", SECRET, soon()))
    early = second.connect(endpoints, [ConnectionKey(0, "data", 0)], "1", SECRET, soon())
    made = third.connect(endpoints, [ConnectionKey(0, "control", 0)], "1", SECRET, soon())
    close([*waiting.results(), made])
    first.close()
    (connection,) = early.values()
    connection.socket.settimeout(SOON)
    assert connection.socket.recv(1) == b""
    connection.close()


def test_a_rank_of_an_earlier_generation_is_refused(meshes: Callable[..., list[Mesh]]) -> None:
    first, second = meshes(2)
    endpoints = endpoints_of([first, second])
    waiting = ConcurrentCalls(lambda: first.connect(endpoints, mesh(0, 2), "2", SECRET, soon()))
    stale = second.connect(endpoints, mesh(1, 2), "1", SECRET, soon())
    (connection,) = stale.values()
    connection.socket.settimeout(SOON)
    assert connection.socket.recv(1) == b""
    connection.close()
    fresh = second.connect(endpoints, mesh(1, 2), "2", SECRET, soon())
    assert_connected([*waiting.results(), fresh])


def test_a_second_claim_to_one_wire_is_refused(meshes: Callable[..., list[Mesh]]) -> None:
    first, second, third = meshes(3)
    endpoints = endpoints_of([first, second, third])
    waiting = ConcurrentCalls(lambda: first.connect(endpoints, mesh(0, 3), "1", SECRET, soon()))
    real = second.connect(endpoints, [ConnectionKey(0, "data", 0)], "1", SECRET, soon())
    again = second.connect(endpoints, [ConnectionKey(0, "data", 0)], "1", SECRET, soon())
    (double,) = again.values()
    double.socket.settimeout(SOON)
    assert double.socket.recv(1) == b""
    double.close()
    last = third.connect(endpoints, [ConnectionKey(0, "data", 0)], "1", SECRET, soon())
    (at_first,) = waiting.results()
    assert_connected([at_first, real, last])


@pytest.mark.parametrize("purpose", [b"", b"rendezvous", b"\x94\xa11\x00\xa4data\x00", b"\x94\xa11\x63\xa4data\x00"])
def test_an_authenticated_client_with_an_invalid_purpose_is_closed(
    meshes: Callable[..., list[Mesh]], purpose: bytes
) -> None:
    """Nothing, another service's purpose, rank 0 itself, rank 99 of 2."""
    first, second = meshes(2)
    endpoints = endpoints_of([first, second])
    waiting = ConcurrentCalls(lambda: first.connect(endpoints, mesh(0, 2), "1", SECRET, soon()))
    with dial(("127.0.0.1", endpoints[0].port), SECRET, purpose, soon()) as nonsense:
        nonsense.socket.settimeout(SOON)
        assert nonsense.socket.recv(1) == b""
    made = second.connect(endpoints, mesh(1, 2), "1", SECRET, soon())
    assert_connected([*waiting.results(), made])


@pytest.mark.parametrize("stranger", BAD_CLIENTS)
@pytest.mark.parametrize("port", ["tcp", "unix"])
def test_unauthenticated_clients_do_not_disturb(meshes: Callable[..., list[Mesh]], stranger: str, port: str) -> None:
    some = meshes(3)
    endpoints = endpoints_of(some)
    address = ("127.0.0.1", endpoints[0].port) if port == "tcp" else endpoints[0].name
    waiting = ConcurrentCalls(partial(some[0].connect, endpoints, mesh(0, 3), "1", SECRET, soon()))
    with visited_by(stranger, address):
        rest = ConcurrentCalls(
            *(partial(some[rank].connect, endpoints, mesh(rank, 3), "1", SECRET, soon()) for rank in (1, 2))
        )
        assert_connected(waiting.results() + rest.results())


def test_a_replayed_handshake_claims_no_wire(meshes: Callable[..., list[Mesh]]) -> None:
    first, second, third = meshes(3)
    endpoints = endpoints_of([first, second, third])
    recorder = Recorder(("127.0.0.1", endpoints[0].port))
    waiting = ConcurrentCalls(lambda: first.connect(endpoints, mesh(0, 3), "1", SECRET, soon()))
    assert isinstance(recorder.address, tuple)
    detour = Endpoint(0, "elsewhere", 0, recorder.address[1], ("127.0.0.1",), "")
    real = second.connect([detour, *endpoints[1:]], [ConnectionKey(0, "data", 0)], "1", SECRET, soon())
    with connect(("127.0.0.1", endpoints[0].port)) as replay:
        receive(replay, 36)
        replay.sendall(recorder.said)
        assert replay.recv(1) == b""
    last = third.connect(endpoints, [ConnectionKey(0, "data", 0)], "1", SECRET, soon())
    (at_first,) = waiting.results()
    assert_connected([at_first, real, last])
    recorder.close()


def test_an_endpoint_tells_where_and_which_process(meshes: Callable[..., list[Mesh]]) -> None:
    board = meshes(5)[4]
    assert (board.endpoint.rank, board.endpoint.host, board.endpoint.pid) == (4, "host", os.getpid())
    assert board.endpoint.addresses == ("127.0.0.1",)
    assert board.endpoint.name.startswith("\0horovod-")
    assert board.endpoint.secret == b""


def test_two_switchboards_of_one_process_have_names_of_their_own(meshes: Callable[..., list[Mesh]]) -> None:
    names = {board.endpoint.name for board in meshes(20)}
    assert len(names) == 20


def test_closing_closes_the_listeners() -> None:
    board = Mesh(0, "host", True)
    board.close()
    for address in [("127.0.0.1", board.endpoint.port), board.endpoint.name]:
        with pytest.raises(OSError):
            connect(address)
    board.close()


def test_only_the_wanted_interface_is_advertised() -> None:
    assert "127.0.0.1" in own_addresses("lo")
    assert not any(address.startswith("127.") for address in own_addresses())
    with pytest.raises(ValueError, match=r"no network interface 'nonesuch9'.*lo"):
        own_addresses("nonesuch9")


def test_an_interface_without_an_address_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"ib0": []})
    with pytest.raises(ValueError, match="'ib0' has no IPv4 address"):
        own_addresses("ib0")


INTERFACES = {
    "lo": [("AF_INET", "127.0.0.1", "255.0.0.0"), ("AF_INET6", "::1", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")],
    "eth0": [
        ("AF_PACKET", "aa:bb:cc:dd:ee:ff", None),
        ("AF_INET", "10.0.0.1", "255.255.0.0"),
        ("AF_INET6", "fd00::1", "ffff:ffff:ffff:ffff::"),
        ("AF_INET6", "fe80::1%eth0", "ffff:ffff:ffff:ffff::"),
    ],
    "eth1": [("AF_INET6", "fd01::1", "ffff:ffff::"), ("AF_INET6", "fe80::2%eth1", "ffff:ffff:ffff:ffff::")],
}


@pytest.mark.parametrize(
    ("present", "interface", "addresses"),
    [
        (["lo", "eth0", "eth1"], "", ["10.0.0.1"]),
        (["lo", "eth1"], "", ["fd01::1"]),
        (["lo", "eth0", "eth1"], "eth1", ["fd01::1"]),
        (["lo", "eth0", "eth1"], "eth0,eth1", ["10.0.0.1"]),
        (["lo"], "", []),
    ],
)
def test_ipv6_addresses_are_for_hosts_without_ipv4(
    monkeypatch: pytest.MonkeyPatch, present: list[str], interface: str, addresses: list[str]
) -> None:
    found = {
        name: [SimpleNamespace(family=getattr(socket, family), address=address, netmask=mask) for family, address, mask in each]
        for name, each in INTERFACES.items()
        if name in present
    }  # fmt: skip
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(psutil, "net_if_stats", dict)
    assert list(own_addresses(interface)) == addresses
    prefixes = {"10.0.0.1": 16, "fd01::1": 32}
    assert [(each.address, each.prefix) for each in networks_of(addresses, named=False)] == [
        (address, prefixes[address]) for address in addresses
    ]


def test_jobs_on_several_hosts_listen_on_all_interfaces() -> None:
    board = Mesh(0, "host", False)
    for address in ("127.0.0.1", "127.0.0.2"):
        socket.create_connection((address, board.endpoint.port), 10).close()
    assert "127.0.0.1" not in board.endpoint.addresses
    board.close()


def test_addresses_of_a_shared_network_are_tried_first_and_those_of_everybodys_bridge_last() -> None:
    own = [IPv4Interface("172.17.0.1/16"), IPv4Interface("10.77.0.1/24"), IPv4Interface("127.0.0.1/8")]
    offered = ["172.17.0.1", "192.168.3.4", "10.77.0.2"]
    assert by_nearness(offered, own) == ["10.77.0.2", "192.168.3.4", "172.17.0.1"]


@pytest.mark.parametrize("waiting", [0, 1])
def test_connecting_to_a_lost_rank_can_be_cancelled(meshes: Callable[..., list[Mesh]], waiting: int) -> None:
    """Rank 0 waits for the other to dial, rank 1 dials where nobody listens any more."""
    both = meshes(2)
    both[1 - waiting].close()
    call = partial(both[waiting].connect, endpoints_of(both), mesh(waiting, 2), "1", SECRET, soon(600))
    running = ConcurrentCalls(call)
    both[waiting].cancel("rank 7 has ended")
    with pytest.raises(MeshError, match="rank 7 has ended"):
        running.results()
