"""The contract of a library of collectives for :class:`~horovod.comm.bytewise.communicator.BytewiseCommunicator`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from horovod.comm.datatypes import Array


class ByteCollectives(ABC):
    """Collectives of one group on one-dimensional arrays of bytes (``uint8``).

    All ranks start the same collectives in the same order. Each of them returns a value for :meth:`wait`, which the caller
    passes to it in the same order. The caller does not access the arrays until :meth:`wait` has returned. Lengths are far below
    the limit of a 32-bit count.

    The arrays may be a script's tensors: after :meth:`wait` has failed, the library must not access them any more. A library
    that cannot guarantee that works on copies.
    """

    @abstractmethod
    def exchange(self, sends: Sequence[Array], receives: Sequence[Array], longest: int) -> Any:
        """Start to send ``sends[r]`` to each other rank r, and to receive ``receives[r]`` from it. Ignores this rank's own two.

        No array on any rank is longer than ``longest``, which is the same on all ranks."""

    @abstractmethod
    def gather(self, own: Array, receives: Sequence[Array], longest: int) -> Any:
        """Start to send ``own`` to every other rank, and to receive ``receives[r]`` from each other rank r.

        No array on any rank is longer than ``longest``, which is the same on all ranks."""

    @abstractmethod
    def broadcast(self, data: Array, root: int) -> Any:
        """Start to copy ``data`` of rank ``root`` into ``data`` of all other ranks, where it has the same length."""

    @abstractmethod
    def wait(self, started: Any) -> None:
        """Return when a collective is complete.

        Args:
            started: the value that the collective has returned.

        Raises:
            PeerFailure: it cannot complete.
            Aborted: :meth:`abort` was called.
        """

    @abstractmethod
    def abort(self) -> None:
        """End the present wait and every later one with ``Aborted``. Any thread may call it, any number of times."""

    def may_still_write(self) -> bool:
        """As :meth:`horovod.comm.base.Communicator.may_still_write`."""
        return False

    def descriptors(self) -> list[int]:
        """Open file descriptors, which a forked child must close."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Release connections, threads and memory. Called once, when no thread waits for a collective."""
