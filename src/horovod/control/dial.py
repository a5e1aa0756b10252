"""The connecting side: reach an address before a deadline and authenticate there."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping

from horovod.control.handshake import GREETING, MAC, ClientHandshake, HandshakeError
from horovod.control.listener import is_same_user

Address = tuple[str, int] | str
"""``(host, port)``, or the name of a Unix socket (an abstract one starts with a NUL character)."""
Secret = bytes | Callable[[socket.socket, float], bytes]
"""The job's secret, or what reads it from the preface of a new connection before a deadline (``time.monotonic``)."""
_FIRST_ATTEMPT_SECONDS = 0.5
_LONGEST_ATTEMPT_SECONDS = 5.0
_FROM_ANYWHERE: Mapping[Address, str] = {}


def describe(address: Address) -> str:
    """An address as a person reads it."""
    if isinstance(address, str):
        return "unix:" + address.replace("\0", "@")
    return f"{address[0]}:{address[1]}"


def alternatives(address: Address) -> list[Address]:
    """The addresses to try, where ``host`` names several, separated by commas."""
    return [address] if isinstance(address, str) else [(host, address[1]) for host in address[0].split(",")]


def receive_exactly(connection: socket.socket, length: int, deadline: float) -> bytes:
    """``length`` bytes from a connection, or an OSError (timeouts included) at ``deadline`` (``time.monotonic``)."""
    data = bytearray()
    while len(data) < length:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("no answer in time")
        connection.settimeout(remaining)
        chunk = connection.recv(min(length - len(data), 1 << 20))
        if not chunk:
            raise ConnectionResetError("the connection was closed")
        data += chunk
    return bytes(data)


def dial(
    address: Address, secret: Secret, purpose: bytes, deadline: float, same_user: bool = False, source: str = ""
) -> socket.socket:
    """One attempt to connect to ``address`` and authenticate.

    Args:
        secret: the job's secret, or how to learn it.
        purpose: what the connection is for; told to the other side.
        deadline: ``time.monotonic`` by which to give up.
        same_user: insist that the other end of a Unix socket runs as our user.
        source: the address of this host to connect from; "" leaves that to the kernel.

    Returns:
        A blocking socket without a timeout, authenticated both ways.

    Raises:
        OSError: not reachable, or no answer in time.
        HandshakeError: what listens there is not of this job.
    """
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        if source:
            connection.bind((source, 0))
        connection.connect(address)
        if same_user and not is_same_user(connection):
            raise HandshakeError("what listens there belongs to another user")
        known = secret if isinstance(secret, bytes) else secret(connection, deadline)
        handshake = ClientHandshake(known, purpose)
        connection.sendall(handshake.answer(receive_exactly(connection, GREETING, deadline)))
        try:
            proof = receive_exactly(connection, MAC, deadline)
        except ConnectionResetError:
            raise HandshakeError(
                "it closed the connection on seeing our proof: has it the same secret, is it of this job?"
            ) from None
        handshake.finish(proof)
        connection.settimeout(None)
        return connection
    except BaseException:
        connection.close()
        raise


def dial_until(
    addresses: list[Address],
    secret: Secret,
    purpose: bytes,
    deadline: float,
    same_user: bool = False,
    sources: Mapping[Address, str] = _FROM_ANYWHERE,
    cancelled: Callable[[], str] = str,
) -> socket.socket:
    """Like :func:`dial`, over several addresses, again and again until one answers or the deadline passes.

    One that does not even refuse costs the others little: every round is more patient than the one before.

    Args:
        sources: by address, which of this host's addresses to connect from.
        cancelled: why to give up before the deadline; asked before each attempt, "" to go on.

    Raises:
        ConnectionError: none answered; the message lists each address and its last error.
    """
    pause = 0.002
    stall_timeout = _LONGEST_ATTEMPT_SECONDS if len(addresses) == 1 else _FIRST_ATTEMPT_SECONDS
    errors: dict[str, str] = {}
    while True:
        if why := cancelled():
            raise ConnectionError(why)
        for address in addresses:
            attempt = min(deadline, time.monotonic() + stall_timeout)
            try:
                return dial(address, secret, purpose, attempt, same_user, sources.get(address, ""))
            except (OSError, HandshakeError) as error:
                errors[describe(address)] = str(error) or type(error).__name__
        if time.monotonic() + pause >= deadline:
            tried = "; ".join(f"{where}: {error}" for where, error in errors.items())
            raise ConnectionError(f"nobody could be reached in time ({tried or 'no address was given'})")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.25)
        stall_timeout = min(stall_timeout * 2, _LONGEST_ATTEMPT_SECONDS)


def set_keepalive(connection: socket.socket, seconds: float) -> None:
    """Have the kernel break a TCP connection whose other host acknowledges nothing for about ``seconds``, sent or not.

    The kernel asks by itself where nothing is sent. A host acknowledges what its processes
    do not look at, too: a stopped process keeps its connections.
    """
    probes = 3
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    each = max(1, round(seconds / (probes + 1)))
    for name, value in (("TCP_KEEPIDLE", each), ("TCP_KEEPINTVL", each), ("TCP_KEEPCNT", probes)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
