"""The contract of a library of collectives for :class:`~horovod.comm.bytewise.communicator.BytewiseCommunicator`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from horovod.comm.datatypes import Array


class ByteCollectives(ABC):
    """Collectives of one group on arrays of bytes (``uint8``). Nothing else may access the arrays until :meth:`wait` has
    returned. All ranks start the collectives in the same order. Each returns a value for :meth:`wait`, which is called in the
    same order. Lengths are far below what a 32-bit count holds. The arrays may be a script's tensors: after :meth:`wait` has
    failed, the library must not access them any more. A library that cannot guarantee that works on copies.
    """

    @abstractmethod
    def exchange(self, sends: Sequence[Array], receives: Sequence[Array], longest: int) -> Any:
        """Send ``sends[r]`` to each other rank r, and receive ``receives[r]`` from it. This rank's own two are left alone.

        No length on any rank is above ``longest``, which is the same on all ranks."""

    @abstractmethod
    def gather(self, own: Array, receives: Sequence[Array], longest: int) -> Any:
        """Send ``own`` to every other rank, and receive ``receives[r]`` from rank r."""

    @abstractmethod
    def broadcast(self, data: Array, root: int) -> Any:
        """Copy ``data`` of ``root`` over that of all others."""

    @abstractmethod
    def wait(self, started: Any) -> None:
        """Return when a collective is complete.

        Raises:
            PeerFailure: it cannot complete.
            Aborted: :meth:`abort` was called.
        """

    @abstractmethod
    def abort(self) -> None:
        """End the present wait and every later one with ``Aborted``. From any thread, any number of times."""

    def may_still_write(self) -> bool:
        """As of :meth:`horovod.comm.base.Communicator.may_still_write`."""
        return False

    def descriptors(self) -> list[int]:
        """Open file descriptors, which a forked child must close."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Called once, when no collective is waited for."""
