"""The ranks that carry out the calls of a group, from one loss to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from horovod.comm.datatypes import DataType
from horovod.comm.reduction import ReduceOp
from horovod.comm.shm.completed_calls import CompletedCalls
from horovod.core.errors import NoNextRound
from horovod.core.negotiation.messages import Operation
from horovod.core.requests.handle import End, Handle
from horovod.core.requests.tensor import Tensor
from horovod.core.submission.prepared import submit
from horovod.core.submission.requests import prepared_call
from horovod.core.worker.worker import WorkerThread
from horovod.torch.distributed.membership import GroupMembership
from horovod.torch.distributed.on_loss.votes import Votes
from horovod.torch.distributed.submission import PREFIX

_POSITIONS, _VOTES = "on_loss.positions", "on_loss.votes"
_SLEEP_SECONDS = 5e-3
"""How long a thread sleeps before it looks again whether a rank was lost."""


class Carrier:
    """A runtime and its ranks.

    Args:
        membership: the group as its process set.
        origins: by rank, the rank that the process had first. Survivors keep their order, so they ascend.
        environment: the environment variables that say the ranks' numbers.

    Attributes:
        worker: this rank's worker.
    """

    def __init__(
        self, membership: GroupMembership, origins: tuple[int, ...], environment: Mapping[str, str] | None = None
    ) -> None:
        self.membership = membership
        self.origins = origins
        self.environment = environment or {}
        self.worker: WorkerThread = membership.generation.workers[membership.number]
        self._calls: CompletedCalls | Votes | None = self.worker.completed_calls
        if self.size > 1 and self._calls is None:
            self._calls = Votes(self._begin_vote)

    def _begin_vote(self, tensors: Sequence[Tensor], op: ReduceOp, end: End) -> Handle:
        call = prepared_call(Operation.ALLREDUCE, PREFIX, _VOTES, tensors, op, line="")
        return submit(self.membership.number, call.request, tensors, tensors, end=end)

    @property
    def size(self) -> int:
        return len(self.origins)

    @property
    def index(self) -> int:
        return self.membership.own_rank

    def publish(self, completed: int) -> None:
        """Let the other members see up to which call this rank has completed all calls."""
        if self._calls is not None:
            self._calls.publish(completed)

    def lowest(self, completed: int) -> int:
        """Up to which call every member has completed all calls, this rank all up to ``completed``."""
        return completed if self._calls is None else min(self._calls.lowest(), completed)

    def is_released(self) -> bool:
        """Whether the runtime has ended on this rank, so that nothing more can be seen of the others."""
        return self._calls is not None and not self._calls.is_open()

    def await_all(self, number: int) -> bool:
        """Wait some milliseconds at most until every member has completed all calls up to ``number``; whether they have. This
        rank has."""
        return self._calls is None or self._calls.await_all(number, _SLEEP_SECONDS)


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


def _reduced(
    membership: GroupMembership, name: str, values: np.ndarray[tuple[int], np.dtype[np.int64]], op: ReduceOp
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    tensors = [Tensor(values, DataType.INT64, values.shape)]
    call = prepared_call(Operation.ALLREDUCE, PREFIX, name, tensors, op, line="")
    handle: Handle = submit(membership.number, call.request, tensors, tensors)
    handle.wait()
    return values
