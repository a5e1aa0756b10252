"""Which hosts reach each other: what is found by trying, and what follows for the job. Hosts are addresses of this machine."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from horovod.control.mesh import Endpoint
from horovod.control.networks import Network
from horovod.control.reachability import UnreachableError, find_unreachable, without_unreachable_addresses

NOWHERE = "240.0.0.1"
"""Of a range that is reserved: the kernel has no route to it, or nothing answers there."""


def endpoint(rank: int, host: str, port: int, *addresses: str, prefix: int = 8) -> Endpoint:
    networks = tuple(Network(address, prefix, 10) for address in addresses)
    return Endpoint(rank, host, 1, port, addresses, "", networks=networks)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("0.0.0.0", 0), backlog=1024) as made:
        yield made


@pytest.fixture
def closed() -> int:
    """A port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        return int(made.getsockname()[1])


def test_hosts_that_reach_each_other_find_nothing(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    endpoints = [endpoint(rank, f"h{rank}", port, f"127.0.0.{rank + 1}") for rank in range(4)]
    assert [find_unreachable(each, endpoints, 5) for each in endpoints] == [{}] * 4
    assert without_unreachable_addresses(endpoints, [{}] * 4) == endpoints


def test_each_address_of_a_host_that_is_not_reached_says_why(listener: socket.socket, closed: int) -> None:
    endpoints = [
        endpoint(0, "a", closed, "127.0.0.1", "127.0.0.2"),
        endpoint(1, "b", listener.getsockname()[1], "127.0.0.3"),
    ]
    findings = [find_unreachable(each, endpoints, 5) for each in endpoints]
    assert findings == [{}, {"a": {"127.0.0.1": "Connection refused", "127.0.0.2": "Connection refused"}}]
    with pytest.raises(UnreachableError) as caught:
        without_unreachable_addresses(endpoints, findings)
    assert caught.value.pairs == ((1, 0),)
    assert str(caught.value).splitlines()[:2] == [
        "Horovod initialization failed: hosts of this job cannot reach each other:",
        "  b cannot reach a at any of its addresses: 127.0.0.1 (Connection refused), 127.0.0.2 (Connection refused)",
    ]


def test_a_host_that_does_not_answer_is_waited_for_as_long_as_was_said() -> None:
    with socket.socket() as full:  # a queue without room: the kernel answers nobody
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        endpoints = [endpoint(0, "a", full.getsockname()[1], "127.0.0.1"), endpoint(1, "b", 1, "127.0.0.2")]
        assert find_unreachable(endpoints[1], endpoints, 0.2) == {"a": {"127.0.0.1": "no answer"}}
        for filler in fillers:
            filler.close()


def test_an_address_in_a_network_of_ones_own_that_is_of_no_use_is_left_out_by_all(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    endpoints = [endpoint(rank, "a", port, "127.0.0.1", NOWHERE) for rank in range(2)]
    endpoints.append(endpoint(2, "b", port, "127.0.0.2", "240.0.0.2"))
    findings = [find_unreachable(each, endpoints, 5) for each in endpoints]
    assert [list(found) for found in findings] == [[], [], ["a"]] and list(findings[2]["a"]) == [NOWHERE]
    assert [each.addresses for each in without_unreachable_addresses(endpoints, findings)] == [("127.0.0.1",)] * 2 + [
        ("127.0.0.2", "240.0.0.2")
    ]
    assert [network.address for network in without_unreachable_addresses(endpoints, findings)[0].networks] == [
        "127.0.0.1"
    ]


def test_an_address_in_a_network_of_others_is_not_worth_mentioning(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    endpoints = [endpoint(0, "a", port, "127.0.0.1", NOWHERE), endpoint(1, "b", port, "127.0.0.2")]
    assert find_unreachable(endpoints[1], endpoints, 5) == {}


def test_only_the_ways_that_ranks_take_are_tried(closed: int) -> None:
    """The higher rank connects to the lower one."""
    blocks = [endpoint(rank, "aabb"[rank], closed, f"127.0.0.{rank + 1}") for rank in range(4)]
    assert [sorted(find_unreachable(each, blocks, 5)) for each in blocks] == [[], [], ["a"], []]
    turns = [endpoint(rank, "abab"[rank], closed, f"127.0.0.{rank + 1}") for rank in range(4)]
    assert [sorted(find_unreachable(each, turns, 5)) for each in turns] == [["b"], ["a"], [], []]


def test_many_hosts_are_tried_with_few_open_files(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    endpoints = [endpoint(rank, f"h{rank}", port, f"127.0.{rank // 200}.{rank % 200 + 1}") for rank in range(600)]
    assert find_unreachable(endpoints[-1], endpoints, 20) == {}


def test_a_long_table_is_cut() -> None:
    endpoints = [endpoint(rank, f"h{rank}", 1, "127.0.0.1") for rank in range(64)]
    silent = {"127.0.0.1": "no answer"}
    with pytest.raises(UnreachableError) as caught:
        without_unreachable_addresses(endpoints, [{}] + [{"h0": silent}] * 63)
    lines = str(caught.value).splitlines()
    assert lines[1] == "  h1 cannot reach h0 at any of its addresses: 127.0.0.1 (no answer)"
    assert lines[21] == "  ... and 43 more" and len(lines) == 23
