"""The ranks that carry out the calls of a group, from one loss to the next."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from horovod.comm.datatypes import DataType
from horovod.comm.reduction import ReduceOp
from horovod.core.errors import NoNextRound
from horovod.core.negotiation.messages import Operation
from horovod.core.requests.handle import Handle
from horovod.core.requests.tensor import Tensor
from horovod.core.submission.prepared import submit
from horovod.core.submission.requests import prepared_call
from horovod.core.worker.worker import WorkerThread
from horovod.torch.distributed.membership import GroupMembership
from horovod.torch.distributed.submission import PREFIX

_VOTE, _POSITIONS = "on_loss.vote", "on_loss.positions"


@dataclass(frozen=True, eq=False)
class Carrier:
    """A runtime and its ranks.

    Attributes:
        membership: the group as its process set.
        origins: by rank, the rank that the process had first. Survivors keep their order, so they ascend.
        environment: the environment variables that say the ranks' numbers.
    """

    membership: GroupMembership
    origins: tuple[int, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.origins)

    @property
    def index(self) -> int:
        return self.membership.own_rank

    @property
    def worker(self) -> WorkerThread:
        """This rank's worker. A KeyError: the runtime has ended."""
        return self.membership.generation.workers[self.membership.number]

    def vote(self, completed: int) -> int:
        """Up to which call every member has completed all calls. Every member votes as soon as it has completed more calls
        than were handed out.

        Raises:
            HorovodInternalError: a member was lost.
        """
        if self.size == 1:
            return completed
        return int(_reduced(self.membership, _VOTE, np.array([completed], np.int64), ReduceOp.MIN)[0])


def met(
    membership: GroupMembership, origin: int, handed: int, environment: Mapping[str, str], *, new: bool
) -> tuple[Carrier, int]:
    """Meet the other ranks that are left. Every member must call it.

    Args:
        origin: the rank that this process had first.
        handed: up to which call it has handed out.
        environment: see :class:`Carrier`.
        new: whether this process makes its group now.

    Returns:
        The carrier, and up to which call a member has handed out.

    Raises:
        NoNextRound: some members make their groups, and others have theirs.
        HorovodInternalError: another member was lost.
    """
    position = np.full(3 + len(membership.ranks), -1, np.int64)
    position[:3] = handed, new, not new
    position[3 + membership.own_rank] = origin
    if len(membership.ranks) > 1:
        position = _reduced(membership, _POSITIONS, position, ReduceOp.MAX)
    furthest, some_new, some_old, *origins = map(int, position)
    if some_new and some_old:
        raise NoNextRound("A rank was lost while init_process_group() made the process group, before all ranks had it.")
    return Carrier(membership, tuple(origins), environment), furthest


def asleep(handle: Handle) -> None:
    """Wait for a handle, and leave it to the worker thread: a thread that carries it out itself would take a core from the
    script's backward pass. Raises the error of the handle.

    It needs no limit: the runtime completes each handle, at the latest when it ends by the loss of a rank or by its time limit.
    """
    if not handle.done():
        done = threading.Event()
        handle.then(done.set)
        done.wait()
    handle.wait()


def _reduced(
    membership: GroupMembership, name: str, values: np.ndarray[tuple[int], np.dtype[np.int64]], op: ReduceOp
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    tensors = [Tensor(values, DataType.INT64, values.shape)]
    call = prepared_call(Operation.ALLREDUCE, PREFIX, name, tensors, op, line="")
    handle: Handle = submit(membership.number, call.request, tensors, tensors)
    asleep(handle)
    return values
