"""The connecting side: reach an address before a deadline and authenticate there."""

from __future__ import annotations

import socket
import time

from horovod.control.handshake import GREETING, MAC, ClientHandshake, HandshakeError
from horovod.control.listener import is_same_user

Address = tuple[str, int] | str
"""``(host, port)``, or the name of a Unix socket (an abstract one starts with a NUL character)."""
_FIRST_ATTEMPT_SECONDS = 0.5
_LONGEST_ATTEMPT_SECONDS = 5.0


def describe(address: Address) -> str:
    """An address as a person reads it."""
    if isinstance(address, str):
        return "unix:" + address.replace("\0", "@")
    return f"{address[0]}:{address[1]}"


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


def dial(address: Address, secret: bytes, purpose: bytes, deadline: float, same_user: bool = False) -> socket.socket:
    """One attempt to connect to ``address`` and authenticate.

    Args:
        secret: the job's secret.
        purpose: what the connection is for; told to the other side.
        deadline: ``time.monotonic`` by which to give up.
        same_user: insist that the other end of a Unix socket runs as our user.

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
        connection.connect(address)
        if same_user and not is_same_user(connection):
            raise HandshakeError("what listens there belongs to another user")
        handshake = ClientHandshake(secret, purpose)
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
    addresses: list[Address], secret: bytes, purpose: bytes, deadline: float, same_user: bool = False
) -> socket.socket:
    """Like :func:`dial`, over several addresses, again and again until one answers or the deadline passes.

    One that does not even refuse costs the others little: every round is more patient than the one before.

    Raises:
        ConnectionError: none answered; the message lists each address and its last error.
    """
    pause = 0.002
    stall_timeout = _LONGEST_ATTEMPT_SECONDS if len(addresses) == 1 else _FIRST_ATTEMPT_SECONDS
    errors: dict[str, str] = {}
    while True:
        for address in addresses:
            attempt = min(deadline, time.monotonic() + stall_timeout)
            try:
                return dial(address, secret, purpose, attempt, same_user)
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
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, each)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, each)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
