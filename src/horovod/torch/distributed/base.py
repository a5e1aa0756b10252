"""The common base of groups: of PyTorch's ProcessGroup in ``group``, and of its Backend in ``backend``."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

from horovod.torch.distributed import membership as memberships
from horovod.torch.distributed.arguments import c10d
from horovod.torch.distributed.futures import threads
from horovod.torch.distributed.group_operations import Operations
from horovod.torch.distributed.point_to_point.send_and_recv import PointToPoint
from horovod.torch.distributed.store import StoreExchange
from horovod.torch.distributed.submission import Submitter
from horovod.torch.distributed.work import HorovodWork
from horovod.torch.uncompiled import uncompiled

NAME = "horovod"


class MonitoredBarrierError(RuntimeError, TimeoutError):
    """Ranks are missing in ``monitored_barrier()``. It is a RuntimeError, as scripts for Gloo expect."""


class Reconfiguration(Protocol):
    """Changes the members of a group; see :mod:`horovod.torch.distributed.reconfigure`."""

    handle: str

    def reconfigure(self, options: Any) -> HorovodWork: ...


@uncompiled
class BackendGroup(Operations, PointToPoint):
    """A group of ranks: its operations, its time limit and its end. A subclass also derives from one of PyTorch's classes."""

    supports_splitting = supports_coalescing = supports_time_estimate = False
    _reconfiguration: Reconfiguration | None = None

    @property
    def supports_reconfigure(self) -> bool:
        """Whether the script may change the members of the group: ``init_process_group(..., enable_reconfigure=True)``."""
        return self._reconfiguration is not None

    def get_reconfigure_handle(self) -> str:
        """The name of this process for :meth:`reconfigure`: ``torch.distributed._get_reconfigure_handle()`` calls it.

        Raises:
            RuntimeError: the group has fixed members.
        """
        return self._reconfigurable().handle

    def reconfigure(self, options: Any) -> HorovodWork:
        """Make the group one of other members: ``torch.distributed._reconfigure()`` calls it. Every new member must call it.

        Args:
            options: PyTorch's ``ReconfigureOptions``, or an object with its ``uuid``, ``handles`` and ``timeout``.

        Returns:
            A work that is done.

        Raises:
            RuntimeError: the group has fixed members, or the arguments are wrong; then nothing has changed.
            HorovodInternalError: the members did not find each other; the message names the missing ones. Then the group has no
                members in this process, which may call it again.
            ValueError: settings of the members differ.
        """
        return self._reconfigurable().reconfigure(options)

    def _reconfigurable(self) -> Reconfiguration:
        if self._reconfiguration is None:
            raise RuntimeError(
                "the members of this process group are fixed. A group whose members may change is the default group if it is "
                'made by torch.distributed.init_process_group("horovod", enable_reconfigure=True), from PyTorch 2.14 on.'
            )
        return self._reconfiguration

    def _join(self, store: Any, submitter: Submitter) -> None:
        """Set the attributes. A subclass calls it in its constructor.

        Args:
            store: the store of the group.
            submitter: submits the calls of the group.
        """
        self._store = store
        self._submitter = submitter

    def rank(self) -> int:
        return int(self._submitter.index)

    def size(self) -> int:
        return int(self._submitter.size)

    getRank, getSize = rank, size  # the names by which C++ code asks, such as DistributedDataParallel's reducer

    @property
    def goes_on(self) -> bool:
        """Whether the group goes on with the ranks that are left when others are lost."""
        return self._submitter.goes_on

    def name(self) -> str:
        return NAME

    getBackendName = _get_backend_name = name

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of sends and receives. The time limit of collectives is fixed when the group is made."""
        self._submitter.seconds = timeout.total_seconds()

    _set_default_timeout = set_timeout

    @property
    def options(self) -> Any:
        """PyTorch's options of a back end: the name, and the time limit of sends and receives."""
        kind: Any = getattr(c10d.Backend, "Options", None) or c10d.ProcessGroup.Options  # in PyTorch 2.1
        return kind(NAME, timedelta(seconds=self._submitter.seconds))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Return when all ranks of the group have called it. It uses the store, so it works even if collectives do not.

        Args:
            timeout: the time limit, as a timedelta, in seconds, or as the attribute ``timeout`` of an object; zero: at once. By
                default, and if it is negative, that of the group.
            wait_all_ranks: has no effect: the message always lists the missing ranks.

        Raises:
            MonitoredBarrierError: ranks are missing after the time limit; the message names them (the first 16), on all ranks.
            RuntimeError: the store cannot be used.
        """
        submitter = self._submitter
        limit = getattr(timeout, "timeout", timeout)
        if isinstance(limit, int | float):
            limit = timedelta(seconds=limit)
        given = isinstance(limit, timedelta) and limit >= timedelta(0)
        seconds = limit.total_seconds() if given and limit is not None else submitter.seconds
        exchange = StoreExchange(
            self._store, submitter.index, submitter.size, "torch.distributed.monitored_barrier()", "barriers"
        )
        try:
            exchange.all_gather("barrier", b"", seconds)
        except TimeoutError as error:
            raise MonitoredBarrierError(str(error)) from None
        exchange.end()

    def supports_tensor_alloc(self, device: Any) -> bool:
        return False

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: the count of a group begins at 0."""

    def _get_sequence_number_for_group(self) -> int:
        """The number of collectives that the script has called, the same on all ranks after the same calls."""
        return self._submitter.calls.made

    def shutdown(self) -> None:
        """End the group: ``destroy_process_group()`` calls it."""
        self._submitter.end()
        memberships.leave(self._submitter.membership, "it called torch.distributed.destroy_process_group()")
        if self._submitter.membership.number == 0:
            threads.end()

    def abort(self) -> None:
        """Fail the collectives that the group has in flight, on all its ranks, and end the group."""
        memberships.abort(self._submitter.membership, "its script aborted the process group")
        if self._submitter.membership.number == 0:
            threads.end()
