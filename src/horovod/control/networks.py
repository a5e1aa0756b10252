"""This host's networks, and which of them two hosts have in common. Pure, but for :func:`networks_of`."""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence
from ipaddress import IPv4Interface, IPv4Network
from typing import NamedTuple

import msgspec
import psutil

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
            if entry.family == socket.AF_INET and entry.address in addresses:
                prefix = IPv4Interface(f"{entry.address}/{entry.netmask or 32}").network.prefixlen
                speed = states[name].speed if name in states else 0
                found.append(Network(entry.address, prefix, NAMED if named else speed))
    return tuple(found)


def common_links(own: Sequence[Network], other: Sequence[Network]) -> list[AddressPair]:
    """The links over which two hosts exchange data: one for each pair of addresses in a network that both are in.

    Only links of the highest speed count: data is split into equal shares, so the slowest link would delay the others. If the
    kernel does not know the speeds, there is one link, since one of the networks may be a management network.

    Both hosts find the same links in the same order, each with its own address first.
    """
    ours, theirs = _by_network(own), _by_network(other)
    found: list[tuple[int, AddressPair]] = []
    for network in sorted(set(ours) & set(theirs)):
        for here, there in zip(ours[network], theirs[network], strict=False):
            if here.address != there.address:  # an address that both have is a bridge inside each host
                found.append((min(here.speed, there.speed), AddressPair(here.address, there.address)))
    fastest = max((speed for speed, _ in found), default=0)
    links = [link for speed, link in found if speed == fastest]
    return links if fastest else links[:1]


def _by_network(networks: Sequence[Network]) -> dict[IPv4Network, list[Network]]:
    found: dict[IPv4Network, list[Network]] = {}
    for each in sorted(networks, key=lambda each: IPv4Interface(each.address)):
        if each.prefix < 32:
            found.setdefault(IPv4Interface(f"{each.address}/{each.prefix}").network, []).append(each)
    return found
