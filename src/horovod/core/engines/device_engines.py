"""The communicators for device memory: one for each group of ranks, built at the first decision on a collective of that group.

All of them belong to the worker thread of the global process set: requests on device memory of all sets go through its
coordinator, so each rank calls its device communicators in one order, the same on all ranks, except for collectives that do
not concern it. :mod:`horovod.comm.nccl.communicator` explains why this keeps communicators from waiting for one another. It
also lets all ranks take part when one is built, over the engine for host memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

from horovod.comm.base import Communicator
from horovod.comm.device import GPU, DeviceRuntime
from horovod.comm.engine import EngineError, EngineGroup, EngineSettings
from horovod.core.engines.engine_building import SplitError, build_for_members
from horovod.core.engines.member_exchange import ExchangeOverCommunicator
from horovod.core.requests import devices

_log = logging.getLogger("horovod.core")


class DeviceEngines:
    """The communicators of one rank for device memory.

    Args:
        engine: the name of the engine.
        rank, size: this process's rank, and the size of the job.
        host: the communicator of all ranks for host memory. Its worker thread calls this object.
        timeout: how long the engine may be busy with one call, or with building a communicator.
    """

    def __init__(self, engine: str, rank: int, size: int, host: Communicator, timeout: timedelta) -> None:
        self.engine = engine
        self._rank = rank
        self._size = size
        self._host = host
        self._timeout = timeout
        self._built: dict[tuple[int, ...], Communicator | str | None] = {}
        self._lock = threading.Lock()
        self._aborted = False

    def of(self, members: Sequence[int]) -> tuple[Communicator | None, list[int]]:
        """The communicator for these global ranks (none: all), or None if this rank is not among them; and the ranks.

        On the worker thread of every rank, in the same order.

        Raises:
            EngineError: the communicator cannot be built. All ranks raise it, each time.
        """
        ranks = list(members) or list(range(self._size))
        key = tuple(ranks)
        if key not in self._built:
            self._build(key)
        known = self._built[key]
        if isinstance(known, str):
            raise EngineError(known)
        return known, ranks

    def _build(self, ranks: tuple[int, ...]) -> None:
        group: EngineGroup | None = None
        if self._rank in ranks:
            group = EngineGroup(
                rank=ranks.index(self._rank),
                size=len(ranks),
                hosts=("",) * len(ranks),
                settings=EngineSettings(stall_timeout=self._timeout),
                runtime=self._runtime(),
            )
        deadline = time.monotonic() + self._timeout.total_seconds()
        made: Communicator | str | None
        try:
            exchange = ExchangeOverCommunicator(self._host)
            whole = self._built.get(tuple(range(self._size)))
            made = build_for_members(
                self.engine, group, ranks, exchange, deadline, GPU, None if isinstance(whole, str) else whole
            )
        except EngineError as error:
            made = str(error)
            if isinstance(error, SplitError):
                self._give_up(tuple(range(self._size)))
        with self._lock:
            self._built[ranks] = made
            if self._aborted and isinstance(made, Communicator):
                made.abort()
        if isinstance(made, Communicator) and group is not None:
            _log.info(
                "%d ranks exchange the memory of GPUs by %s, this one with %s", len(ranks), self.engine, group.runtime
            )

    def _give_up(self, ranks: tuple[int, ...]) -> None:
        """Drop a communicator that has failed on all its ranks. The next collective of these ranks builds a new one."""
        with self._lock:
            known = self._built.pop(ranks, None)
        if isinstance(known, Communicator):
            known.abort()
            known.close()

    def _runtime(self) -> DeviceRuntime | None:
        provider = devices.provider()
        return None if provider is None else provider.runtime()

    def abort(self) -> None:
        """Interrupt collectives on the device and calls that wait. Any thread may call it; it returns at once."""
        with self._lock:
            self._aborted = True
            built = list(self._built.values())
        for each in built:
            if isinstance(each, Communicator):
                each.abort()

    def drop(self, members: Sequence[int]) -> None:
        """Release the communicator of these ranks. All of them call it, when none of their collectives is running."""
        with self._lock:
            known = self._built.pop(tuple(members), None)
        if isinstance(known, Communicator):
            known.close()

    def close(self) -> None:
        """Release everything, on all ranks."""
        with self._lock:
            built, self._built = list(self._built.values()), {}
        for each in built:
            if isinstance(each, Communicator):
                each.close()
