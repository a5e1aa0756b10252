"""The connecting side: connects to an address before a deadline, and authenticates there."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from horovod._base.running_time import LATE_SECONDS, running_time
from horovod.control.connection import Connection, is_same_user, receive_exactly
from horovod.control.handshake import GREETING, MAC, ClientHandshake, HandshakeError

Address = tuple[str, int] | str
"""``(host, port)``, or the name of a Unix socket; an abstract name starts with a NUL character."""
Secret = bytes | Callable[[socket.socket, float], bytes]
"""The job's secret, or a function that reads it from the preface of a new connection before a deadline (``time.monotonic``)."""
Addresses = list[Address] | Callable[[], list[Address]]
"""Addresses to try, or a function that finds them, which is called in each round of tries."""
_FIRST_TRY_SECONDS = 0.5
_LONGEST_TRY_SECONDS = 5.0
_FROM_ANYWHERE: Mapping[Address, str] = {}


def describe(address: Address) -> str:
    """An address as text, for errors."""
    if isinstance(address, str):
        return "unix:" + address.replace("\0", "@")
    return f"{address[0]}:{address[1]}"


def alternatives(address: Address) -> list[Address]:
    """The addresses to try: ``host`` may name several, separated by commas."""
    return [address] if isinstance(address, str) else [(host, address[1]) for host in address[0].split(",")]


def anywhere(addresses: Collection[str]) -> str:
    """Where to listen so that others can connect to these addresses of this host."""
    return "::" if any(":" in address for address in addresses) else "0.0.0.0"


def listening_socket(host: str, port: int) -> socket.socket:
    """A TCP socket that is bound to an address. One that is bound to ``::`` takes IPv4 as well.

    Raises:
        OSError: the address is in use, or is not one of this host.
    """
    made = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if made.family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind((host, port))
    except OSError:
        made.close()
        raise
    return made


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _connect(address: Address, source: str, deadline: float) -> socket.socket:
    """Connect to one address, or to each that a name resolves to until one answers."""
    targets: list[tuple[int, Any]] = [(socket.AF_UNIX, address)]
    if not isinstance(address, str):
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        targets = sorted((family, where) for family, _, _, _, where in found)  # IPv4 first
    for number, (family, where) in enumerate(targets, 1):
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            now = time.monotonic()
            connection.settimeout(max(0.001, (deadline - now) / (len(targets) - number + 1)))
            if source:
                connection.bind((source, 0))
            connection.connect(where)
            return connection
        except BaseException as error:
            connection.close()
            if number == len(targets) or not isinstance(error, OSError):
                raise
    raise OSError("the name has no address")


def dial(address: Address, secret: Secret, purpose: bytes, deadline: float, source: str = "") -> Connection:
    """Try once to connect to ``address`` and to authenticate. The peer on a Unix socket must run as this process's user.

    Args:
        secret: the job's secret, or a function that reads it from the connection.
        purpose: what the connection is for; sent to the peer.
        deadline: when to give up (``time.monotonic``).
        source: the address of this host to connect from; "" leaves that to the kernel.

    Returns:
        The connection, authenticated both ways. Its socket blocks, without a timeout.

    Raises:
        OSError: the address cannot be reached, or does not answer in time.
        HandshakeError: the process that listens there does not belong to this job.
    """
    connection = _connect(address, source, deadline)
    try:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        if isinstance(address, str) and not is_same_user(connection):
            raise HandshakeError("the process that listens there belongs to another user")
        known = secret if isinstance(secret, bytes) else secret(connection, deadline)
        handshake = ClientHandshake(known, purpose)
        connection.sendall(handshake.answer(receive_exactly(connection, GREETING, deadline)))
        try:
            proof = receive_exactly(connection, MAC, deadline)
        except ConnectionResetError:
            raise HandshakeError(
                "it closed the connection on seeing our proof: does it belong to this job, with the same secret?"
            ) from None
        handshake.finish(proof)
        connection.settimeout(None)
        return Connection(connection, handshake.keys)
    except BaseException:
        connection.close()
        raise


def dial_until(
    addresses: Addresses,
    secret: Secret,
    purpose: bytes,
    deadline: float,
    sources: Mapping[Address, str] = _FROM_ANYWHERE,
    cancelled: Callable[[], str] = str,
) -> Connection:
    """Try several addresses with :func:`dial`, again and again, until one answers or the deadline passes.

    With several addresses, the first tries are short, and the time for each try grows from round to round, so an address that
    never answers hardly delays the others.

    Args:
        addresses: tried in this order, in each round. The other arguments are those of :func:`dial`.
        deadline: time in which this process is stopped does not count.
        sources: by address, which of this host's addresses to connect from.
        cancelled: returns the reason to give up before the deadline, "" to continue; called before each attempt.

    Raises:
        ConnectionError: none has answered; the message lists each address with its last error.
    """
    pause = 0.002
    began = time.monotonic()

    def left() -> float:
        return deadline - began - running_time.age(began, time.monotonic())

    def find() -> list[Address]:
        return addresses if isinstance(addresses, list) else addresses()

    seconds = _LONGEST_TRY_SECONDS if len(find()) == 1 else _FIRST_TRY_SECONDS
    errors: dict[str, Exception] = {}
    while True:
        if why := cancelled():
            raise ConnectionError(why)
        for address in find():
            started = time.monotonic()
            try_until = started + min(left(), seconds)
            try:
                return dial(address, secret, purpose, try_until, sources.get(address, ""))
            except (OSError, HandshakeError) as error:
                if not (isinstance(error, TimeoutError) and isinstance(errors.get(describe(address)), HandshakeError)):
                    errors[describe(address)] = error  # the last try may be too short to be refused again
            if (ended := time.monotonic()) - try_until > LATE_SECONDS:
                running_time.leave_out(
                    started, ended
                )  # stopped at some moment of the try: no process can have answered it
        if left() <= pause:
            tried = "; ".join(f"{where}: {str(error) or type(error).__name__}" for where, error in errors.items())
            raise ConnectionError(f"no address answered in time ({tried or 'no address was given'})")
        planned = time.monotonic() + pause
        time.sleep(pause)  # nothing signals that another host has begun to listen
        running_time.turn(planned, time.monotonic())
        pause = min(pause * 1.5, 0.25)
        seconds = min(seconds * 2, _LONGEST_TRY_SECONDS)


def set_keepalive(connection: socket.socket, seconds: float) -> None:
    """Have the kernel break a TCP connection when the peer's host acknowledges nothing for about ``seconds``.

    The kernel sends probes while nothing else is sent. The host of a stopped process still acknowledges.
    """
    probes = 2  # the kernel gives up when it would send one more
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    each = max(1, round(seconds / (probes + 1)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, each)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, each)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
