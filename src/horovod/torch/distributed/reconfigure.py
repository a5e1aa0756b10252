"""Changes the members of the default group when the script says so: ``torch.distributed._reconfigure``.

PyTorch has this from 2.14 on, for groups of ``init_process_group(..., enable_reconfigure=True)``. Such a group has no members
at first, so no process waits for one that has not started. Each process has a handle, its name. The script exchanges handles by
other means, and calls ``_reconfigure(uuid, handles)`` in every process of the next membership. The order of the handles gives
the ranks. Members that are left out need not call anything, and may have ended.

The new members meet in the store of the group, under keys of the uuid, so others may meet at the same time. Each leaves its
present runtime, and begins the next one. Collectives that are in flight fail, also on members that are left out.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import socket
import weakref
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from datetime import timedelta
from typing import Any

import torch.distributed

from horovod._base.config import CPU_OPERATIONS, GPU_OPERATIONS, Config
from horovod.comm.mpi.engine import MpiEngine
from horovod.core.errors import HorovodInternalError
from horovod.core.lifecycle import context, elastic_process
from horovod.core.lifecycle.generation import Generation
from horovod.core.lifecycle.steps_made import StepCount
from horovod.core.lifecycle.world import World
from horovod.core.requests.handle import Handle
from horovod.environments import identity
from horovod.torch.distributed.base import NAME
from horovod.torch.distributed.membership import GroupMembership, begin, identity_of, of_runtime
from horovod.torch.distributed.next_membership import adopt
from horovod.torch.distributed.process_group import HorovodProcessGroup
from horovod.torch.distributed.store import StoreExchange
from horovod.torch.distributed.work import HorovodWork

dist: Any = torch.distributed  # its stubs lack some classes

_log = logging.getLogger("horovod.torch")

CALL = "torch.distributed._reconfigure()"
_ADVICE = (
    f"this process group has no members now: {CALL} has not been called yet, or has failed, or abort() was called. Exchange "
    f"the handles of the members, torch.distributed._get_reconfigure_handle(), and call {CALL} with a new uuid."
)


def unformed(store: Any, rank: int, size: int) -> GroupMembership:
    """The membership of a group before the first reconfiguration: it has the numbers that the script has given, and no runtime.

    Args:
        store: the store of the group.
    """
    own = identity_of(rank, size)
    absent = Generation(World(own, own), Config.from_env())  # it is never started
    return GroupMembership(absent, 0, rank, range(size), store, StepCount(), _ADVICE)


class ScriptedMembers:
    """The members of a group, which the script chooses.

    Args:
        group: the group.
        store: its store, which all processes share that may become members. It must outlive each of them.
        time_limit: of the group.

    Attributes:
        handle: the name of this process, the same for as long as the group exists.
    """

    def __init__(self, group: HorovodProcessGroup, store: Any, time_limit: timedelta) -> None:
        self.handle = f"{NAME}:{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
        self._group = weakref.ref(group)
        self._store = store
        self._time_limit = time_limit
        self._used: set[int] = set()
        self._handles: list[str] = []  # of the present membership

    def reconfigure(self, options: Any) -> HorovodWork:
        """See :meth:`horovod.torch.distributed.base.BackendGroup.reconfigure`."""
        group = self._group()
        assert group is not None  # it has called this
        uuid, handles = int(options.uuid), _ordered(options.handles)
        limit = getattr(options, "timeout", None) or self._time_limit
        rank, what = self._check(uuid, handles), f"torch.distributed._reconfigure(uuid={uuid})"
        prefix = f"{NAME}/reconfigure/{uuid}"
        self._claim(uuid, handles, prefix)
        store = dist.PrefixStore(f"{prefix}/", self._store)
        exchange = StoreExchange(store, rank, len(handles), what, names=[_description(each) for each in handles])
        failure = group.generation.termination.failure
        asked_for = context.end(f"it called {CALL}")
        try:
            begin(exchange, rank, len(handles), self._time_limit, limit)
        except OSError as error:  # a member did not come in time, or was lost meanwhile
            raise HorovodInternalError(f"{what}: {error}") from error
        if asked_for:
            context.init(identity)  # the script has called hvd.init(), so the end of the group must not end the runtime
        found = of_runtime(context.current(), store)._replace(advice=_ADVICE)
        adopt(group, found, store, f"make it again after {CALL}")
        if rank == 0:
            _report(self._handles, handles, failure)
        self._handles = handles
        done = Handle()
        done.complete()
        return HorovodWork(done, None, [], "reconfigure")

    def _check(self, uuid: int, handles: Sequence[str]) -> int:
        """Check the arguments. Returns this process's rank among the handles.

        Raises:
            RuntimeError: they are wrong.
        """
        if uuid in self._used:
            raise _already_used(uuid)
        twice = [each for each in handles if handles.count(each) > 1]
        if twice:
            raise RuntimeError(f"{CALL}: the handle {twice[0]} is listed more than once.")
        foreign = [each for each in handles if not each.startswith(f"{NAME}:") or each.count(":") != 3]
        if foreign:
            raise RuntimeError(f'{CALL}: {foreign[0]!r} is not a handle of a group of the back end "{NAME}".')
        if self.handle not in handles:
            raise RuntimeError(
                f"{CALL}: the handle of this process, {self.handle}, is not one of the {len(handles)} that are listed. Call "
                "it only in the processes of the list."
            )
        return handles.index(self.handle)

    def _claim(self, uuid: int, handles: Sequence[str], prefix: str) -> None:
        """Take the uuid for these members in the store, where other members may have used it."""
        digest = hashlib.sha256("\n".join(handles).encode()).hexdigest()
        claimed = self._store.compare_set(f"{prefix}/members", "", digest)
        if bytes(claimed).decode() != digest:
            raise _already_used(uuid)
        self._used.add(uuid)


def _report(before: Sequence[str], handles: Sequence[str], failure: HorovodInternalError | None) -> None:
    """Log which members are not in the next membership: a warning if the job has lost one of them.

    Args:
        before, handles: the last members and the next ones, by rank.
        failure: what has ended the last membership; None if nothing has failed.
    """
    gone = [rank for rank, handle in enumerate(before) if handle not in handles]
    lost = set(failure.ranks).intersection(gone) if failure is not None else set()
    if gone:
        named = ", ".join(f"rank {rank} ({_description(before[rank])})" for rank in gone)
        reason = f": {failure.reason}" if failure is not None and lost else ""
        level, left = (logging.WARNING if lost else logging.INFO), len(handles)
        _log.log(level, "%d rank%s of the process group go on without %s%s", left, "s" * (left != 1), named, reason)


def _ordered(handles: Any) -> list[str]:
    """The handles in the order of the ranks. A set has the order of its texts."""
    listed = [str(each) for each in handles]
    return sorted(listed) if isinstance(handles, AbstractSet) else listed


def _description(handle: str) -> str:
    _, host, process, _ = handle.split(":")
    return f"process {process} on {host}"


def _already_used(uuid: int) -> RuntimeError:
    return RuntimeError(
        f"{CALL}: uuid {uuid} was already used, by this process or by other members. Choose a new one, the same on all members."
    )


def check_possible() -> None:
    """Check that the script may choose the members in this job.

    Raises:
        ValueError: it may not.
    """
    if elastic_process.this_process() is not None:
        raise ValueError(
            "enable_reconfigure=True: in an elastic job the launcher chooses the members of the default group. Leave it out, "
            "and train in a function with @hvd.elastic.run."
        )
    settings = Config.from_env()
    if MpiEngine.name in (settings.cpu_operations, settings.gpu_operations):
        raise ValueError(
            f"enable_reconfigure=True: {CPU_OPERATIONS} or {GPU_OPERATIONS} forces {MpiEngine.name}, and MPI's ranks "
            "are fixed. Unset it."
        )
