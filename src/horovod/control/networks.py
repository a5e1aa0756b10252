"""This host's networks, and which of them two hosts have in common. Pure, but for :func:`networks_of`."""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence
from ipaddress import IPv4Interface, IPv4Network, IPv6Interface, IPv6Network, ip_address, ip_interface
from typing import Any, NamedTuple, TypeAlias

import msgspec
import psutil

_AnyNetwork: TypeAlias = IPv4Network | IPv6Network

NAMED = 1 << 31
"""The speed assumed for every network interface that the user has named, so that all of them are used."""


class Network(msgspec.Struct, array_like=True, frozen=True):
    """An address of this host and the network it belongs to."""

    address: str
    prefix: int
    """The length of the network's prefix, in bits."""
    speed: int
    """In Mbit/s; 0 if the kernel does not know it, as on many virtual machines."""


class AddressPair(NamedTuple):
    """Two addresses between which ranks of two hosts can connect, in one network."""

    own: str
    other: str


def networks_of(addresses: Collection[str], named: bool) -> tuple[Network, ...]:
    """The networks of these addresses of this host.

    Args:
        named: whether the user has chosen the interfaces.
    """
    states = psutil.net_if_stats()
    found = []
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.address in addresses:
                speed = states[name].speed if name in states else 0
                prefix = interface_of(entry).network.prefixlen
                found.append(Network(entry.address, prefix, NAMED if named else speed))
    return tuple(found)


def interface_of(entry: Any) -> IPv4Interface | IPv6Interface:
    """An address of ``psutil.net_if_addrs`` with its network; a network of one address if the kernel does not tell."""
    address = ip_address(entry.address)
    mask = int(ip_address(entry.netmask)).bit_count() if entry.netmask else address.max_prefixlen
    return ip_interface(f"{address}/{mask}")


def usable(entry: Any) -> bool:
    """Whether another host may connect to this address: an IPv4 or IPv6 address that is not only for this host or this link."""
    if entry.family not in (socket.AF_INET, socket.AF_INET6) or "%" in entry.address:
        return False
    address = ip_address(entry.address)
    return not (address.is_loopback or (address.version == 6 and address.is_link_local))


def common_links(own: Sequence[Network], other: Sequence[Network]) -> list[AddressPair]:
    """The links over which two hosts exchange data: one for each pair of addresses in a network that both are in.

    Only links of the highest speed count: data is split into equal shares, so the slowest link would delay the others. If the
    kernel does not know the speeds, there is one link, since one of the networks may be a management network.

    Both hosts find the same links in the same order, each with its own address first.
    """
    ours, theirs = _by_network(own), _by_network(other)
    found: list[tuple[int, AddressPair]] = []
    for network in sorted(set(ours) & set(theirs), key=_order):
        for here, there in zip(ours[network], theirs[network], strict=False):
            if here.address != there.address:  # an address that both have is a bridge inside each host
                found.append((min(here.speed, there.speed), AddressPair(here.address, there.address)))
    fastest = max((speed for speed, _ in found), default=0)
    links = [link for speed, link in found if speed == fastest]
    return links if fastest else links[:1]


def _by_network(networks: Sequence[Network]) -> dict[_AnyNetwork, list[Network]]:
    found: dict[_AnyNetwork, list[Network]] = {}
    for each in sorted(networks, key=lambda each: _order(ip_interface(each.address))):
        if each.prefix < ip_address(each.address).max_prefixlen:
            found.setdefault(ip_interface(f"{each.address}/{each.prefix}").network, []).append(each)
    return found


def _order(network: IPv4Interface | IPv6Interface | _AnyNetwork) -> tuple[int, bytes, int]:
    first = network.ip if isinstance(network, IPv4Interface | IPv6Interface) else network.network_address
    return network.version, first.packed, 0 if isinstance(network, IPv4Interface | IPv6Interface) else network.prefixlen
