"""A process between two others that passes their handshake through, and then does as it likes with one direction."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack

from horovod.control.handshake import GREETING, MAC, NONCE
from horovod.control.sealing import DIGEST_BYTES, LENGTH_BYTES
from time_limits import SOON
from unit.control.unauthenticated_clients import receive

Attack = Callable[[list[bytes]], list[bytes]]
"""Takes the messages that were to be passed on, as they are on the connection, and returns those that are."""


def _message(source: socket.socket) -> bytes:
    head = receive(source, LENGTH_BYTES + DIGEST_BYTES)
    return head + receive(source, int.from_bytes(head[:LENGTH_BYTES], "big") + DIGEST_BYTES)


class Proxy:
    """Listens on a loopback port, and connects one client to ``server``.

    Args:
        attack: gets ``count`` messages of one direction, when all have come; later messages are passed on as they are.
        to_server: the direction.
    """

    def __init__(self, server: tuple[str, int], attack: Attack, count: int, to_server: bool) -> None:
        self._server, self._attack, self._count, self._to_server = server, attack, count, to_server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    @property
    def address(self) -> tuple[str, int]:
        return self._listener.getsockname()[:2]

    def close(self) -> None:
        with ExitStack() as stack:
            for each in (self._listener, *self._ends):
                stack.callback(each.close)
                try:
                    each.shutdown(socket.SHUT_RDWR)  # wakes the threads
                except OSError:
                    pass  # it has ended
            for thread in self._threads:
                thread.join(SOON)

    def _serve(self) -> None:
        try:
            client, _ = self._listener.accept()
            self._ends += [client, server := socket.create_connection(self._server)]
            client.sendall(receive(server, GREETING))
            server.sendall(head := receive(client, NONCE + 2))
            server.sendall(receive(client, int.from_bytes(head[-2:], "big") + MAC))
            client.sendall(receive(server, MAC))
        except (OSError, AssertionError):
            return  # closed meanwhile
        back = threading.Thread(target=self._pass, args=(server, client, not self._to_server))
        self._threads.append(back)
        back.start()
        self._pass(client, server, self._to_server)

    def _pass(self, source: socket.socket, target: socket.socket, attacked: bool) -> None:
        try:
            if attacked:
                for message in self._attack([_message(source) for _ in range(self._count)]):
                    target.sendall(message)
            while data := source.recv(1 << 16):
                target.sendall(data)
        except (OSError, AssertionError):
            pass  # one of the two has closed its connection
        for each in (source, target):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # closed already
