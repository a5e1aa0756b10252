"""A stand-in for oneCCL's library whose ranks are threads of one process: it moves the bytes, and a call blocks until
all have come."""

from __future__ import annotations

import ctypes
import threading
from typing import Any


class _Meeting:
    """Where the calls of all ranks meet: each leaves what it sends, and goes when everybody has taken what it wants."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.sent: dict[int, bytes] = {}

    def exchange(self, rank: int, data: bytes) -> dict[int, bytes]:
        self.sent[rank] = data
        self.barrier.wait()
        found = dict(self.sent)
        self.barrier.wait()
        return found


class LateLibrary:
    """As :class:`horovod.comm.ccl.library.Library`; one object for all ranks of one group. Knows what it must not
    be asked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._meeting: _Meeting | None = None

    def communicator(self, size: int, unique_id: bytes, rank: int) -> Any:
        assert len(unique_id) == 4096
        with self._lock:
            self._meeting = self._meeting or _Meeting(size)
        self._meeting.exchange(rank, b"")
        return rank

    def _exchange(self, rank: int, data: bytes) -> dict[int, bytes]:
        assert self._meeting is not None
        found = self._meeting.exchange(rank, data)
        assert len({len(each) for each in found.values()}) == 1, "the ranks' counts differ"
        return found

    def allgather(self, communicator: Any, source: int, target: int, count: int) -> None:
        found = self._exchange(communicator, ctypes.string_at(source, count))
        for rank, data in found.items():
            ctypes.memmove(target + rank * count, data, count)

    def alltoall(self, communicator: Any, source: int, target: int, count: int) -> None:
        assert self._meeting is not None
        found = self._exchange(communicator, ctypes.string_at(source, count * self._meeting.size))
        for rank, data in found.items():
            ctypes.memmove(target + rank * count, data[communicator * count : (communicator + 1) * count], count)

    def broadcast(self, communicator: Any, data: int, count: int, root: int) -> None:
        found = self._exchange(communicator, ctypes.string_at(data, count))
        ctypes.memmove(data, found[root], count)

    def destroy(self, communicator: Any) -> None:
        """Waits for nobody, as all ranks do at the end of a test in turn."""

    def let_go(self) -> None:
        """End the calls that wait for a rank that will never come, so that no thread is left."""
        if self._meeting is not None:
            self._meeting.barrier.abort()
