"""On rank 0: answers the live view of the job, and serves its metrics if the user wants it.

The live view asks at an abstract Unix socket, which takes processes of the same user only. Metrics are Prometheus's text over
HTTP. One thread serves both; it sleeps in one ``poll``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

from horovod.control.connection import is_same_user
from horovod.control.wakeup import WakeUp
from horovod.observe.live_address import new_name

_log = logging.getLogger("horovod.core")

_SECONDS = 1.0
"""How long one reader may take."""
_PAUSE_SECONDS = 0.05
"""Pause after a connection that could not be accepted, so that the thread does not poll without pause."""
_WAITING_READERS = 16
_LOOPBACK = "127.0.0.1"
UNIX = "unix:"


class MetricsAddressError(Exception):
    """Metrics cannot be served at the address that the user asked for; the message says why."""


class LiveServer:
    """The server of one generation.

    Args:
        snapshot: returns the job as of now, encoded.
        metrics: returns the text of the metrics.
        metrics_address: the user's setting: ``PORT``, ``HOST:PORT`` or ``unix:PATH``; "": none.

    Raises:
        MetricsAddressError: metrics cannot be served at that address.
    """

    def __init__(self, snapshot: Callable[[], bytes], metrics: Callable[[], str], metrics_address: str) -> None:
        self._snapshot = snapshot
        self._metrics = metrics
        self._wake_up = WakeUp()
        self._leaving = False
        self._path: Path | None = None
        self._made = (0, 0)
        self._live = self._listen_to_views()
        self._scraped: socket.socket | None = None
        if metrics_address:
            try:
                self._scraped = self._listen_to_scrapers(metrics_address)
            except (OSError, ValueError) as error:
                self._release()
                raise MetricsAddressError(f"metrics cannot be served at {metrics_address!r}: {error}") from error
        self._thread = threading.Thread(target=self._serve, name="horovod-live", daemon=True)

    @staticmethod
    def _listen_to_views() -> socket.socket | None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(new_name(os.getpid()))
            listener.listen(_WAITING_READERS)
        except OSError as error:
            listener.close()
            _log.info("horovod.top cannot show this job: %s", error)
            return None
        return listener

    def _listen_to_scrapers(self, address: str) -> socket.socket:
        if address.startswith(UNIX):
            path = Path(address.removeprefix(UNIX))
            _remove_left_socket(path)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(str(path))
            self._path, self._made = path, _identity(path)
        else:
            host, _, port = address.rpartition(":")
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host.strip("[]") or _LOOPBACK, int(port)))
        listener.listen(_WAITING_READERS)
        return listener

    @property
    def metrics_port(self) -> int:
        """The port at which metrics are served; 0 for none."""
        name = self._scraped.getsockname() if self._scraped is not None else ""
        return int(name[1]) if isinstance(name, tuple) else 0

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread, and release everything."""
        self._leaving = True
        self._wake_up.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._release()

    def _release(self) -> None:
        for listener in (self._live, self._scraped):
            if listener is not None:
                listener.close()
        if self._path is not None:
            with contextlib.suppress(OSError):
                if _identity(self._path) == self._made:  # else another process has replaced it
                    self._path.unlink()
        self._wake_up.close()

    def descriptors(self) -> list[int]:
        """The descriptors that a forked child must close."""
        listeners = [each.fileno() for each in (self._live, self._scraped) if each is not None]
        return [*listeners, *self._wake_up.descriptors()]

    def _serve(self) -> None:
        poll = select.poll()
        answers = {}
        for listener, answer in ((self._live, self._answer_view), (self._scraped, self._answer_scraper)):
            if listener is not None:
                listener.setblocking(False)
                poll.register(listener, select.POLLIN)
                answers[listener.fileno()] = listener, answer
        poll.register(self._wake_up, select.POLLIN)
        while not self._leaving:
            for descriptor, _ in poll.poll():
                if descriptor in answers:
                    self._answer(*answers[descriptor])

    @staticmethod
    def _answer(listener: socket.socket, answer: Callable[[socket.socket], None]) -> None:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # out of descriptors; the listening socket remains readable
            time.sleep(_PAUSE_SECONDS)
            return
        with connection, contextlib.suppress(OSError):  # the reader has left, or is too slow
            connection.settimeout(_SECONDS)
            answer(connection)

    def _answer_view(self, connection: socket.socket) -> None:
        if is_same_user(connection):
            connection.sendall(self._snapshot())

    def _answer_scraper(self, connection: socket.socket) -> None:
        asked = connection.recv(4096)
        if asked[:4] not in (b"GET ", b"HEAD"):
            connection.sendall(b"HTTP/1.0 405 Method Not Allowed\r\n\r\n")
            return
        body = self._metrics().encode()
        head = f"HTTP/1.0 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        connection.sendall(head + (b"" if asked.startswith(b"HEAD") else body))


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def _remove_left_socket(path: Path) -> None:
    """Remove a socket that a killed job of this user has left. Anything else stays.

    Raises:
        OSError: something else stands there, or a process serves at the socket.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise FileExistsError("the path exists and is not a socket; remove it, or name another path")
    if found.st_uid != os.getuid():
        raise FileExistsError("the socket there belongs to another user; name another path")
    with contextlib.suppress(ConnectionRefusedError), socket.socket(socket.AF_UNIX) as other:
        other.settimeout(_SECONDS)
        other.connect(str(path))
        raise OSError("another process already serves at this address")
    path.unlink()
