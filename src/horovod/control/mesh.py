"""How ranks connect to each other: their endpoints, and one round of connecting and accepting.

A :class:`Mesh` exists only while connections are made. Then its listening sockets are closed, so a running job has no open
port. Of two ranks the higher one connects and the lower one accepts. Every rank accepts while it connects, on some threads at a
time, so no rank waits until another one is done with its own.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ipaddress import IPv4Interface, IPv6Interface, ip_address
from typing import NamedTuple

import msgspec
import psutil

from horovod._base.config import START_TIMEOUT
from horovod.control.connection import Connection
from horovod.control.dial import Address, anywhere, dial_until, listening_socket
from horovod.control.fd_limit import DescriptorLimitError, make_room
from horovod.control.listener import ConnectionListener
from horovod.control.lost_rank import LostRankError, text_of_loss
from horovod.control.networks import Network, common_links, interface_of, networks_of, usable
from horovod.control.processes import own_process_namespace
from horovod.control.wakeup import WakeUp


class Endpoint(msgspec.Struct, array_like=True, frozen=True):
    """The addresses at which one rank can be reached, and its process."""

    rank: int
    host: str
    """The host name from its launcher, else the machine's. Ranks with the same name are on one host."""
    pid: int
    port: int
    addresses: tuple[str, ...]
    name: str
    """The name of its Unix socket. Ranks that can connect to it can also be passed a descriptor."""
    secret: bytes = b""
    """The job's secret, made by rank 0 if the launcher gave none. It is sent only between processes of one user on one host."""
    process_namespace: str = ""
    """Identifies the processes that this rank can inspect: :func:`horovod.control.processes.own_process_namespace`."""
    networks: tuple[Network, ...] = ()
    """The networks of its addresses."""

    def limited_to(self, addresses: Collection[str]) -> Endpoint:
        """The endpoint with only these of its addresses; unchanged if it has none of them."""
        left = tuple(address for address in self.addresses if address in addresses)
        if not left or left == self.addresses:
            return self
        networks = tuple(network for network in self.networks if network.address in left)
        return msgspec.structs.replace(self, addresses=left, networks=networks)


class ConnectionKey(NamedTuple):
    """One connection that a rank needs: with which peer, in which role, for which process set."""

    peer: int
    role: str
    group: int
    link: int = 0
    """The index of its link among the :func:`~horovod.control.networks.common_links` of both hosts."""


class _Purpose(msgspec.Struct, array_like=True):
    generation: str
    rank: int
    role: str
    group: int
    link: int = 0


_decode_purpose = msgspec.msgpack.Decoder(_Purpose).decode


class MeshError(RuntimeError):
    """Some ranks could not be connected; the message says which."""


class LostPeerError(LostRankError, MeshError):
    """A rank could not be reached, or did not connect."""

    def __init__(self, rank: int, doing: str, why: str) -> None:
        super().__init__(text_of_loss(rank, doing, why))
        self.lost_rank = rank


_DIALLED_AT_ONCE = 16
"""To how many lower ranks a rank connects at a time. Each is a thread that waits for a handshake of several messages."""


class Mesh:
    """This rank's listening sockets, open until :meth:`close`.

    Args:
        rank: this rank.
        host: its host name, for its endpoint.
        local_only: all ranks are on this machine, so the rank listens on the loopback interface only.
        interface: the network interface whose addresses are advertised; "" for all.
    """

    def __init__(self, rank: int, host: str, local_only: bool, interface: str = "") -> None:
        self._rank = rank
        self._early: dict[tuple[str, ConnectionKey], Connection] = {}
        self._cancelled = ""
        self._wake_up = WakeUp()
        addresses = ("127.0.0.1",) if local_only else own_addresses(interface)
        tcp = listening_socket("127.0.0.1" if local_only else anywhere(addresses), 0)
        self._listeners = [tcp]
        try:
            tcp.listen(1024)
            name = f"\0horovod-{os.getpid()}-{secrets.token_hex(8)}"
            unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listeners.append(unix)
            unix.bind(name)
            unix.listen(1024)
        except OSError:
            self.close()
            raise
        networks = () if local_only else networks_of(addresses, named=bool(interface))
        port = tcp.getsockname()[1]
        self.endpoint = Endpoint(
            rank, host, os.getpid(), port, addresses, name, process_namespace=own_process_namespace(), networks=networks
        )

    def keep_to(self, addresses: Collection[str]) -> None:
        """Advertise only these addresses from now on: the others are known to be unreachable."""
        self.endpoint = self.endpoint.limited_to(addresses)

    def connect(
        self,
        endpoints: Sequence[Endpoint],
        keys: Collection[ConnectionKey],
        generation: str,
        secret: bytes,
        deadline: float,
    ) -> dict[ConnectionKey, Connection]:
        """Make all connections of ``keys``. Each peer must call it at the same time with its own keys.

        Args:
            endpoints: of all ranks, by rank.
            keys: the connections of this rank.
            generation: distinguishes this round from earlier ones of the same job.
            secret: the job's secret.
            deadline: ``time.monotonic`` by which all peers must have connected.

        Returns:
            Authenticated connections, whose sockets block.

        Raises:
            LostPeerError: a peer could not be reached, or did not connect.
            MeshError: it was cancelled, or this process may not open so many connections.
        """
        try:
            make_room(len(keys), f"rank {self._rank}")
        except DescriptorLimitError as error:
            raise MeshError(str(error)) from error
        made: dict[ConnectionKey, Connection] = {}
        try:
            expected = {key for key in keys if key.peer > self._rank}
            for key in list(expected):
                early = self._early.pop((generation, key), None)
                if early is not None:
                    expected.discard(key)
                    made[key] = early
            with self._dialling(endpoints, keys, generation, secret, deadline, made) as dialled:
                self._accept(expected, made, dialled, len(endpoints), generation, secret, deadline)
        except BaseException:
            for connection in made.values():
                connection.close()
            raise
        return made

    def cancel(self, reason: str) -> None:
        """Make :meth:`connect` fail, now or later, because a rank will not connect. Any thread.

        Args:
            reason: for the error.
        """
        self._cancelled = reason
        self._wake_up.set()

    def close(self) -> None:
        """Close the listening sockets, and connections that were not asked for."""
        self._wake_up.close()
        for listener in self._listeners:
            listener.close()
        for connection in self._early.values():
            connection.close()
        self._early.clear()

    def _was_cancelled(self) -> MeshError:
        return MeshError(f"rank {self._rank} cannot be connected: {self._cancelled}")

    @contextmanager
    def _dialling(
        self,
        endpoints: Sequence[Endpoint],
        keys: Collection[ConnectionKey],
        generation: str,
        secret: bytes,
        deadline: float,
        made: dict[ConnectionKey, Connection],
    ) -> Iterator[Callable[[], bool]]:
        """Connect to the lower ranks on threads, into ``made``. The result says whether all are connected, and raises the error
        of the first that cannot be."""
        own = sorted(key for key in keys if key.peer < self._rank)
        over = threading.Event()  # the others need not be connected any more

        def dial(key: ConnectionKey) -> Connection:
            return self._dial(endpoints[key.peer], key, generation, secret, deadline, over)

        if not own:
            yield lambda: True
            return
        with ThreadPoolExecutor(min(_DIALLED_AT_ONCE, len(own)), "horovod-connect") as threads:
            dialled = {key: threads.submit(dial, key) for key in own}
            for each in dialled.values():
                each.add_done_callback(lambda _: self._wake_up.set())

            def all_connected() -> bool:
                done = {key: each for key, each in dialled.items() if each.done()}
                for key, each in done.items():
                    made[key] = each.result()
                    del dialled[key]
                return not dialled

            try:
                yield all_connected
            finally:
                over.set()
                threads.shutdown(cancel_futures=True)
                for each in dialled.values():
                    if not each.cancelled() and each.exception() is None:
                        each.result().close()

    def _dial(
        self,
        endpoint: Endpoint,
        key: ConnectionKey,
        generation: str,
        secret: bytes,
        deadline: float,
        over: threading.Event,
    ) -> Connection:
        addresses: list[Address] = []
        if endpoint.host == self.endpoint.host:
            addresses.append(endpoint.name)
            addresses.append(("127.0.0.1", endpoint.port))
        sources: dict[Address, str] = {}
        links = common_links(self.endpoint.networks, endpoint.networks)
        if links and endpoint.host != self.endpoint.host:
            link = links[key.link % len(links)]
            addresses.append((link.other, endpoint.port))
            sources[addresses[-1]] = link.own
        nearest = (
            by_nearness(endpoint.addresses, _own_networks()) if len(endpoint.addresses) > 1 else endpoint.addresses
        )
        addresses += [(address, endpoint.port) for address in nearest if (address, endpoint.port) not in addresses]
        purpose = msgspec.msgpack.encode(_Purpose(generation, self._rank, key.role, key.group, key.link))

        def cancelled() -> str:
            return self._cancelled or ("another rank cannot be connected" if over.is_set() else "")

        try:
            return dial_until(addresses, secret, purpose, deadline, sources=sources, cancelled=cancelled)
        except ConnectionError as error:
            if self._cancelled:
                raise self._was_cancelled() from error
            doing = f"rank {self._rank} connected to it on {endpoint.host}"
            raise LostPeerError(endpoint.rank, doing, str(error)) from error

    def _accept(
        self,
        expected: set[ConnectionKey],
        made: dict[ConnectionKey, Connection],
        dialled: Callable[[], bool],
        size: int,
        generation: str,
        secret: bytes,
        deadline: float,
    ) -> None:
        def welcome(connection: Connection, text: bytes) -> None:
            try:
                purpose = _decode_purpose(text)
            except msgspec.DecodeError:
                connection.close()
                return
            key = ConnectionKey(purpose.rank, purpose.role, purpose.group, purpose.link)
            known = key in made or (generation, key) in self._early
            if purpose.generation != generation or known or not self._rank < key.peer < size:
                connection.close()
                return
            connection.socket.setblocking(True)
            if key in expected:
                expected.discard(key)
                made[key] = connection
            else:  # the peer is one round ahead
                self._early[generation, key] = connection

        with selectors.DefaultSelector() as selector:
            listener = ConnectionListener(selector, self._listeners, secret, welcome, expected=len(expected))
            selector.register(self._wake_up, selectors.EVENT_READ, lambda _: self._wake_up.clear())
            try:
                while not (ready := dialled()) or expected:
                    now = time.monotonic()
                    if self._cancelled:
                        raise self._was_cancelled()
                    if now >= deadline and ready:  # else the threads raise soon: they have the same deadline
                        missing = sorted({key.peer for key in expected})
                        raise LostPeerError(
                            missing[0],
                            f"rank {self._rank} waited for connections",
                            f"ranks {missing} did not connect to it in time. Look at their output; if they only need more time "
                            f"to start, raise horovodrun --start-timeout ({START_TIMEOUT})",
                        )
                    wake = min(deadline, listener.next_deadline() or deadline)
                    for key, events in selector.select(max(0.01, wake - now)):
                        key.data(events)
                    listener.expire()
            finally:
                listener.close()


def data_connections(own: Endpoint, other: Endpoint, role: str, group: int) -> list[ConnectionKey]:
    """The connections on which two ranks exchange data: one for each link of their hosts."""
    links = common_links(own.networks, other.networks) if own.host != other.host else []
    return [ConnectionKey(other.rank, role, group, link) for link in range(max(1, len(links)))]


def own_addresses(interface: str = "") -> tuple[str, ...]:
    """The IPv4 addresses at which other hosts may reach this one; without loopback, and without interfaces that are down. If
    there are none, its IPv6 addresses, except those of one link.

    The addresses of a named interface are returned even if it is down.

    Args:
        interface: the names of interfaces, separated by commas; "" for all.

    Raises:
        ValueError: this host has no interface of that name, or the interface has no address.
    """
    found = psutil.net_if_addrs()
    if interface:
        wanted = interface.split(",")
        found = {name: addresses for name, addresses in found.items() if name in wanted}
        if not found:
            raise ValueError(
                f"this host has no network interface {interface!r}; it has {', '.join(psutil.net_if_addrs())}"
            )
    else:
        states = psutil.net_if_stats()
        found = {name: addresses for name, addresses in found.items() if name not in states or states[name].isup}
    entries = [entry for each in found.values() for entry in each if usable(entry)]
    named = [entry for each in found.values() for entry in each if interface and entry.family == socket.AF_INET]
    addresses = named or [entry for entry in entries if entry.family == socket.AF_INET] or entries
    if interface and not addresses:
        raise ValueError(
            f"network interface {interface!r} has no IPv4 address, and no IPv6 address of more than its link"
        )
    return tuple(entry.address for entry in addresses)


def by_nearness(addresses: Sequence[str], own: Collection[IPv4Interface | IPv6Interface]) -> list[str]:
    """Another host's addresses, the most likely first: those in a network of this host, then those of other networks.

    Addresses that this host has as well come last. They belong to a bridge or tunnel that every host has, and lead back here.
    """

    def distance(address: str) -> int:
        parsed = ip_address(address)
        if any(parsed == each.ip for each in own):
            return 2
        return 0 if any(parsed in each.network for each in own) else 1

    return sorted(addresses, key=distance)


def _own_networks() -> list[IPv4Interface | IPv6Interface]:
    return [
        interface_of(entry)
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET or usable(entry)
    ]
