"""Which networks two hosts have in common, and which of them carry data. Without any network."""

from __future__ import annotations

import psutil
import pytest

from horovod.control.networks import NAMED, AddressPair, Network, common_links, networks_of


def hosts(*networks: tuple[str, int, int], here: int = 1, there: int = 2) -> tuple[list[Network], list[Network]]:
    """Two hosts in the same networks, each written as ("10.0.0.{}", prefix, speed)."""
    return tuple([Network(text.format(host), *rest) for text, *rest in networks] for host in (here, there))  # type: ignore[return-value]  # two hosts are two lists


def both_ways(own: list[Network], other: list[Network]) -> list[AddressPair]:
    links = common_links(own, other)
    assert common_links(other, own) == [AddressPair(there, here) for here, there in links]
    return links


def test_networks_of_the_same_speed_are_used_together() -> None:
    links = both_ways(*hosts(("10.2.0.{}", 24, 1000), ("10.1.0.{}", 24, 1000)))
    assert links == [AddressPair("10.1.0.1", "10.1.0.2"), AddressPair("10.2.0.1", "10.2.0.2")]


def test_a_slow_network_does_not_hold_up_a_fast_one() -> None:
    assert both_ways(*hosts(("10.1.0.{}", 24, 1000), ("10.2.0.{}", 24, 100_000))) == [
        AddressPair("10.2.0.1", "10.2.0.2")
    ]


def test_without_known_speeds_one_network_is_used() -> None:
    assert both_ways(*hosts(("10.1.0.{}", 24, 0), ("10.2.0.{}", 24, 0))) == [AddressPair("10.1.0.1", "10.1.0.2")]


def test_all_networks_that_the_user_has_named_are_used() -> None:
    assert len(both_ways(*hosts(("10.1.0.{}", 24, NAMED), ("10.2.0.{}", 24, NAMED)))) == 2


def test_a_network_that_one_host_is_not_in_is_not_used() -> None:
    own, other = hosts(("10.1.0.{}", 24, 1000), ("10.2.0.{}", 24, 1000))
    assert both_ways(own, other[1:]) == [AddressPair("10.2.0.1", "10.2.0.2")]
    assert both_ways(own, [Network("10.3.0.2", 24, 1000)]) == []


def test_two_interfaces_of_each_host_in_one_network_are_two_links() -> None:
    assert both_ways(*hosts(("10.0.0.{}", 16, 1000), ("10.0.1.{}", 16, 1000))) == [
        AddressPair("10.0.0.1", "10.0.0.2"), AddressPair("10.0.1.1", "10.0.1.2"),
    ]  # fmt: skip


def test_a_bridge_that_every_host_has_leads_to_no_other() -> None:
    assert both_ways(*hosts(("172.17.0.1", 16, 10_000), ("10.1.0.{}", 24, 1000))) == [
        AddressPair("10.1.0.1", "10.1.0.2")
    ]


def test_an_address_without_a_network_is_no_link() -> None:
    assert both_ways([Network("10.1.0.1", 32, 1000)], [Network("10.1.0.2", 32, 1000)]) == []


@pytest.mark.parametrize("named", [False, True])
def test_the_networks_of_this_host(named: bool) -> None:
    (loopback,) = networks_of({"127.0.0.1"}, named)
    assert (loopback.address, loopback.prefix) == ("127.0.0.1", 8)
    states = psutil.net_if_stats()
    assert loopback.speed == (NAMED if named else states["lo"].speed)


def test_networks_of_ipv6_are_links_too() -> None:
    own = [Network("fd00::1", 64, 0), Network("fd01::1", 64, 0), Network("fd02::1", 128, 0)]
    other = [Network("fd01::2", 64, 0), Network("fd02::1", 128, 0)]
    assert common_links(own, other) == [AddressPair("fd01::1", "fd01::2")]
