"""The exchange of addresses under Hydra (MPICH, Intel MPI) without an MPI library: in Hydra's own key-value store.

Hydra gives every process a socket, whose descriptor is in ``PMI_FD``, and serves the process management interface there,
version 1: lines of fields ``name=value``, one answer to each. After the next barrier, which all processes of the job must
enter, every process can read the values that the others have put. An MPI library in the same process uses the same socket. It
can be loaded later, because ``init`` may be sent twice.

Source: the message protocol of PMI version 1.1 (MPICH, ``pmi-1.1.txt``; Flux RFC 13).
"""

from __future__ import annotations

import atexit
import base64
import os
import select
import socket
import sys
import time
from collections.abc import Mapping

from horovod.control.rendezvous.rendezvous_kinds import WithoutServer, not_all_came

DESCRIPTOR = "PMI_FD"
"""The environment variable that holds the socket's number."""
_LONGEST_LINE = 1 << 20


class PMIError(RuntimeError):
    """The process manager refused a request or is gone; the message says which."""


class Client:
    """This process's connection to its process manager. One thread at a time.

    Args:
        descriptor: the number in ``PMI_FD``.
        deadline: when the process manager must have answered (``time.monotonic``).

    Raises:
        PMIError: the descriptor is not such a connection, or its other end speaks another protocol.
        TimeoutError: the process manager does not answer in time.
    """

    def __init__(self, descriptor: int, deadline: float) -> None:
        copy = -1  # a copy, since os.dup makes it close-on-exec
        try:
            copy = os.dup(descriptor)
            self._socket = socket.socket(fileno=copy)
        except OSError as error:
            if copy >= 0:
                os.close(copy)
            raise PMIError(
                f"{DESCRIPTOR}={descriptor} is not a socket of the process manager: {error.strerror}"
            ) from None
        self._received = b""
        self._rounds = 0
        try:
            self._ask("init", deadline, pmi_version="1", pmi_subversion="1")
            self._longest = int(self._ask("get_maxes", deadline)["vallen_max"]) - 1
            self._store = self._ask("get_my_kvsname", deadline)["kvsname"]
        except BaseException:
            self._socket.close()
            raise

    def exchange(self, rank: int, size: int, value: bytes, seconds: float) -> list[bytes]:
        """All-gather ``value``; every one of the ``size`` processes that were launched must call it.

        Raises:
            TimeoutError: not all processes called it within ``seconds``. PMI does not tell which.
            PMIError: the process manager is gone.
        """
        deadline = time.monotonic() + seconds
        self._rounds += 1
        text = base64.urlsafe_b64encode(value).decode().rstrip("=")  # "=" ends a name
        parts = [text[start : start + self._longest] for start in range(0, len(text), self._longest)]
        self._put(f"{rank}", str(len(parts)), deadline)
        for number, part in enumerate(parts):
            self._put(f"{rank}-{number}", part, deadline)
        try:
            self._ask("barrier_in", deadline)
        except TimeoutError:
            raise not_all_came(f"{size} ranks", "hvd.init()", seconds) from None
        return [value if other == rank else self._fetch(other, deadline) for other in range(size)]

    def finish(self) -> None:
        """Tell the process manager that this process ends normally, unless an MPI library in the process does so itself."""
        if "mpi4py.MPI" not in sys.modules:
            try:
                self._ask("finalize", time.monotonic() + 1.0)
            except (OSError, PMIError):
                pass  # the job is ending
        self._socket.close()

    def close(self) -> None:
        """Close the connection without a message."""
        self._socket.close()

    def _fetch(self, rank: int, deadline: float) -> bytes:
        number = int(self._get(f"{rank}", deadline))
        text = "".join(self._get(f"{rank}-{part}", deadline) for part in range(number))
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))

    def _put(self, key: str, value: str, deadline: float) -> None:
        self._ask("put", deadline, kvsname=self._store, key=self._key(key), value=value)

    def _get(self, key: str, deadline: float) -> str:
        return self._ask("get", deadline, kvsname=self._store, key=self._key(key))["value"]

    def _key(self, key: str) -> str:
        return f"horovod-{self._rounds}-{key}"  # a value cannot be put twice under one key

    def _ask(self, command: str, deadline: float, **fields: str) -> Mapping[str, str]:
        line = " ".join([f"cmd={command}", *(f"{name}={value}" for name, value in fields.items())])
        try:
            self._socket.sendall(line.encode() + b"\n")
            answer = self._read_line(deadline)
        except TimeoutError:
            raise
        except OSError as error:
            raise PMIError(f"the process manager that started this rank is gone ({error.strerror})") from None
        found = dict(field.split("=", 1) for field in answer.split(" ") if "=" in field)
        if found.get("rc", "0") != "0" or "cmd" not in found:
            raise PMIError(f"the process manager answers {answer!r} to {command!r}")
        return found

    def _read_line(self, deadline: float) -> str:
        while b"\n" not in self._received:
            # Not with a timeout of the socket: that would make the descriptor non-blocking, and an MPI library shares it.
            if not select.select([self._socket], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError("the process manager has not answered in time")
            data = self._socket.recv(1 << 16)
            if not data or len(self._received) > _LONGEST_LINE:
                raise PMIError("the process manager that started this rank is gone")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line.decode(errors="replace").strip()


_clients: dict[int, Client] = {}
"""By process id: a forked child must not use its parent's connection."""


class RendezvousOverPmi(WithoutServer):
    """All-gathers of all processes that Hydra has launched.

    Args:
        descriptor: the number in ``PMI_FD``.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def gather(self, rank: int, size: int, value: bytes, seconds: float) -> list[bytes]:
        """As :meth:`WithoutServer.gather`. Raises PMIError if the process manager is gone, or speaks another protocol."""
        client = _clients.get(os.getpid())
        if client is None:
            client = _clients[os.getpid()] = Client(self._descriptor, time.monotonic() + seconds)
            atexit.register(_finish, os.getpid())
        try:
            return client.exchange(rank, size, value, seconds)
        except BaseException:
            # Later answers would not match later requests.
            del _clients[os.getpid()]
            client.close()
            raise


def _finish(process: int) -> None:
    if os.getpid() == process and process in _clients:
        _clients.pop(process).finish()
