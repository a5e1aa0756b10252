"""Rank 0's server of the live view and of metrics: who gets what, and what is left when it ends."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from horovod.core.lifecycle import live_server
from horovod.core.lifecycle.live_server import LiveServer, MetricsAddressError
from horovod.observe.live_address import ancestors, listening, names_of
from time_limits import SOON
from unit.control.concurrent_ranks import wait_until


@contextmanager
def served(metrics_address: str = "") -> Iterator[LiveServer]:
    server = LiveServer(lambda: b"view", lambda: "metric 1\n", metrics_address)
    server.start()
    try:
        yield server
    finally:
        server.close()


def exchange(family: socket.AddressFamily, address: object, request: bytes = b"") -> bytes:
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(SOON)
        connection.connect(address)  # type: ignore[arg-type]  # of whatever family
        if request:  # where there is none, the server may have answered and closed by now
            connection.sendall(request)
        found = b""
        while part := connection.recv(4096):
            found += part
        return found


def test_the_live_view_is_found_while_it_serves() -> None:
    assert os.getpid() not in listening()
    with served():
        assert os.getpid() in listening()
        assert exchange(socket.AF_UNIX, *names_of(os.getpid())) == b"view"
    assert os.getpid() not in listening()


def test_metrics_on_a_port_are_on_loopback_unless_told() -> None:
    with served("0") as server:
        found = exchange(socket.AF_INET, ("127.0.0.1", server.metrics_port), b"GET /metrics HTTP/1.1\r\n\r\n")
        head, _, body = found.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.0 200 OK\r\n")
        assert body == b"metric 1\n"
        assert exchange(socket.AF_INET, ("127.0.0.1", server.metrics_port), b"POST / HTTP/1.1\r\n\r\n")[9:12] == b"405"
        with pytest.raises(ConnectionRefusedError):
            exchange(socket.AF_INET, ("127.0.0.2", server.metrics_port))
    with served("0.0.0.0:0") as server:
        assert b"metric 1" in exchange(socket.AF_INET, ("127.0.0.2", server.metrics_port), b"GET / HTTP/1.0\r\n\r\n")


def test_metrics_at_a_unix_socket_replace_one_that_a_killed_job_has_left(tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with served(f"unix:{path}"):
        assert b"metric 1" in exchange(socket.AF_UNIX, str(path), b"GET / HTTP/1.0\r\n\r\n")
        with pytest.raises(MetricsAddressError, match="another process already serves at this address"):
            LiveServer(lambda: b"", str, f"unix:{path}")
    assert not path.exists()


def other_than_a_socket_of_this_user(kind: str, path: Path) -> None:
    if kind == "file":
        path.write_text("precious")
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        left = path.with_name("left")
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(left))
        path.symlink_to(left)


@pytest.mark.parametrize("kind", ["file", "folder", "fifo", "link"])
def test_metrics_remove_nothing_but_a_socket(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "metrics"
    other_than_a_socket_of_this_user(kind, path)
    before = path.lstat()
    with pytest.raises(MetricsAddressError, match=f"cannot be served at 'unix:{path}': .* not a socket"):
        LiveServer(lambda: b"", str, f"unix:{path}")
    assert path.lstat() == before
    if kind == "file":
        assert path.read_text() == "precious"


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives a file to another user")
def test_metrics_do_not_replace_a_socket_of_another_user(tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    os.chown(path, 65534, 65534)
    with pytest.raises(MetricsAddressError, match="another user"):
        LiveServer(lambda: b"", str, f"unix:{path}")
    assert path.is_socket()


def test_the_end_of_a_server_leaves_what_has_replaced_its_socket(tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    with served(f"unix:{path}"):
        path.unlink()
        path.write_text("precious")
    assert path.read_text() == "precious"


@pytest.mark.parametrize("address", ["no port", "127.0.0.1:x", "203.0.113.7:1", "unix:/no/such/folder/x"])
def test_an_address_that_does_not_serve_is_an_error_that_names_it(address: str) -> None:
    with pytest.raises(MetricsAddressError, match=f"metrics cannot be served at '{address}'"):
        LiveServer(lambda: b"", str, address)


def test_ancestors_lead_to_the_first_process() -> None:
    found = ancestors(os.getpid())
    assert found[:2] == [os.getpid(), os.getppid()]
    assert len(set(found)) == len(found)


@contextmanager
def no_free_descriptor() -> Iterator[None]:
    """A block in which this process can open nothing more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Path(os.devnull).open() as lowest_free:
        number = lowest_free.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_there_is_a_pause_after_a_reader_that_cannot_be_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        time.sleep(seconds)

    monkeypatch.setattr(live_server, "time", SimpleNamespace(sleep=sleep))
    with served(), socket.socket(socket.AF_UNIX) as reader:
        reader.settimeout(SOON)
        (name,) = names_of(os.getpid())
        with no_free_descriptor():
            reader.connect(name)
            wait_until(lambda: pauses, "a pause")
        assert reader.recv(100) == b"view"
    assert min(pauses) > 0
