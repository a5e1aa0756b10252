"""Adds and removes process sets while the job runs. Every rank of the job must call, in the same order.

1. The ranks exchange over the global set which set they want to add or remove, and their endpoints. If they disagree, all ranks
   raise, and nothing has changed.
2. To add a set, its members connect and make a worker, as in ``init()``. The ranks exchange whether they could. If one could
   not, all ranks raise, and the set and its number are free again.
3. To remove a set, its members run a barrier. Everything that all members have submitted before is decided by then, and runs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from horovod._base.config import DYNAMIC_PROCESS_SETS, Config
from horovod.comm.datatypes import Array, DataType
from horovod.control.connection import Connection
from horovod.control.mesh import ConnectionKey, Endpoint, Mesh
from horovod.core.errors import SHUT_DOWN
from horovod.core.lifecycle.assembly import assemble, control_connections, tree_of
from horovod.core.lifecycle.context import current
from horovod.core.lifecycle.generation import Generation
from horovod.core.lifecycle.process_set import ProcessSet, membership
from horovod.core.negotiation.messages import Operation, Request
from horovod.core.requests.tensor import Tensor
from horovod.core.submission import collectives
from horovod.core.submission.arguments import set_id
from horovod.core.worker.worker import WorkerThread


class _Change(msgspec.Struct, array_like=True):
    """One rank's request to change the process sets.

    Attributes:
        sets: the ranks of each set to add; empty for a removal.
        remove: the number of the set to remove; -1 for an addition.
        endpoint: where the other members reach this rank.
        obstacle: the reason why this rank could not do its part of an agreed change; "" if it could.
    """

    sets: tuple[tuple[int, ...], ...]
    remove: int
    endpoint: Endpoint | None
    obstacle: str = ""

    def __str__(self) -> str:
        if self.remove >= 0:
            return f"removes set {self.remove}"
        return f"adds {', '.join(str(list(ranks)) for ranks in self.sets)}"


_decode_change = msgspec.msgpack.Decoder(_Change).decode

_REMOVED = "the process set was removed"


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set. Returns when every rank of the job has registered the same set.

    Every rank of the job must call it, members or not, in the same order. It needs ``HOROVOD_DYNAMIC_PROCESS_SETS=1`` or
    ``hvd.init(process_sets="dynamic")``.

    Args:
        process_set: a :class:`ProcessSet`, or a list of global ranks.

    Returns:
        The registered process set: ``process_set`` itself if it is a :class:`ProcessSet`.

    Raises:
        ValueError: not initialised, dynamic process sets are not enabled, a rank does not exist or is listed twice, the set
            exists already, or the ranks disagree on the set.
        NotImplementedError: the set is made from an mpi4py communicator.
        RuntimeError: a member could not connect, or start what the set needs; the message says which and why. Then nothing has
            changed on any rank.
        HorovodInternalError: the job has failed meanwhile.
    """
    context = _dynamic_context("adding")
    wanted = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if wanted.ranks is None:
        raise NotImplementedError(  # the type that scripts of the public interface expect
            "A process set made from an mpi4py communicator cannot be added later: pass it to hvd.init(process_sets=...), or "
            "add the list of its ranks."
        )
    add_apart(context, [wanted])
    return wanted


def add_apart(context: Generation, wanted: Sequence[ProcessSet]) -> None:
    """Register process sets that have no ranks in common, in one exchange however many they are.

    Every rank of the job must call it, with the same sets in the same order. The errors are those of :func:`add_process_set`.

    Args:
        wanted: sets whose ranks are known. Their numbers are filled in.
    """
    identity, config = context.identity, context.config
    sets = tuple(tuple(each.ranks or ()) for each in wanted)
    mesh = Mesh(identity.rank, identity.hostname, identity.local_size == identity.size, config.network_interfaces)
    try:
        mesh.keep_to(context.addresses)
        own = _Change(sets, -1, mesh.endpoint)
        changes = _exchange(context, own)
        for rank, change in enumerate(changes):
            if change.sets != sets:
                raise ValueError(
                    f"the ranks do not add the same process set: rank {identity.rank} {own}, rank {rank} {change}"
                )
        for ranks in sets:  # after the exchange, so that all ranks raise
            _check(list(ranks), identity.size)
        free = _free(context, len(sets))
        worker, failure, mine = None, None, -1
        for group, ranks in zip(free, sets, strict=True):
            if identity.rank not in ranks:
                continue
            try:
                generation = f"{context.generation}.{context.changes}"
                known = {change.endpoint.rank: change.endpoint for change in changes if change.endpoint is not None}
                mine = group
                worker = assemble_set(context, group, list(ranks), known, mesh, generation, context.config)
            except Exception as error:
                failure = error
    finally:
        mesh.close()
    try:
        _check_all_could(context, sets, failure)
    except BaseException:
        if worker is not None:
            worker.close()
        raise
    # From here on, all ranks have the sets.
    del context.freed[: len(sets)]
    for process_set, group, ranks in zip(wanted, free, sets, strict=True):
        membership.ranks[group] = list(ranks)
        process_set.process_set_id = group
    if worker is not None:
        worker.registration = context.changes
        start_set(context, mine, worker)


def _free(context: Generation, wanted: int) -> list[int]:
    """Numbers for so many new sets, the same on all ranks."""
    first = max(membership.ranks) + 1
    return [*context.freed, *range(first, first + wanted)][:wanted]


def _check_all_could(context: Generation, sets: tuple[tuple[int, ...], ...], failure: Exception | None) -> None:
    """Raise on all ranks if one could not do its part."""
    obstacle = "" if failure is None else f"{type(failure).__name__}: {failure}"
    outcomes = _exchange(context, _Change(sets, -1, None, obstacle))
    obstacles = [f"rank {rank}: {outcome.obstacle}" for rank, outcome in enumerate(outcomes) if outcome.obstacle]
    if obstacles:
        raise RuntimeError(
            f"The process set {', '.join(str(list(ranks)) for ranks in sets)} could not be added, and nothing has changed: "
            f"{'; '.join(obstacles)}"
        ) from failure


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. Every rank of the job must call it, with the set of the same number.

    A collective that all members have submitted is finished first; one that some members have not submitted fails. The set may
    be added again, and then gets a new number.

    Args:
        process_set: a registered process set.

    Returns:
        True if the set was removed. False for the global set and for a set that is not registered; then nothing is removed.

    Raises:
        TypeError: the argument is not a :class:`ProcessSet`.
        ValueError: not initialised, dynamic process sets are not enabled, or the ranks disagree on the set.
        HorovodInternalError: the job has failed before the set was removed.
    """
    context = _dynamic_context("removing")
    group = set_id(process_set)
    if group == 0:
        return False
    if group is None or group not in membership.ranks:
        process_set.process_set_id = None
        return False
    own = _Change((), group, None)
    for rank, change in enumerate(_exchange(context, own)):
        if change.remove != group:
            raise ValueError(
                f"the ranks do not remove the same process set: rank {context.identity.rank} {own}, rank {rank} {change}"
            )
    worker = context.workers.get(group)
    if worker is not None:
        # Everything that all members have submitted before the barrier is decided by then, and runs.
        _barrier(group)
        context.end_worker(group, _REMOVED)
    if context.device_engine:
        # The same for requests on device memory, which all go to the coordinator of all ranks. The second barrier holds back
        # a rank that leaves the job next: on all ranks, what is left of the set fails for its removal, and not for that.
        _barrier(0)
        context.workers[0].executor.drop_members(membership.ranks[group], f"{SHUT_DOWN} This was caused by {_REMOVED}.")
        _barrier(0)
    process_set.process_set_id = None
    del membership.ranks[group]
    context.freed.append(group)
    return True


def _barrier(group: int) -> None:
    collectives.submit(group, Request(Operation.BARRIER, "process_sets.removal", transient=True)).wait()


def _check(ranks: list[int], size: int) -> None:
    wrong = [rank for rank in ranks if not 0 <= rank < size]
    if wrong or not ranks or len(set(ranks)) != len(ranks):
        what = f"rank {wrong[0]} is not one of the job's {size}" if wrong else "every rank must be listed once"
        raise ValueError(f"Attempted to add an invalid process set {ranks}: {what}")
    if ranks in membership.ranks.values():
        raise ValueError(f"Attempted to add a duplicate process set: {ranks}")


def _dynamic_context(action: str) -> Generation:
    context = current()
    if not context.config.dynamic_process_sets:
        raise ValueError(f"Set {DYNAMIC_PROCESS_SETS}=1 to allow {action} process sets after Horovod initialization.")
    return context


def _exchange(context: Generation, change: _Change) -> list[_Change]:
    """The changes that the ranks ask for, by rank. Every rank calls it."""
    data = np.frombuffer(msgspec.msgpack.encode(change), np.uint8).copy()
    lengths = np.zeros(context.identity.size, np.int64)
    gathered: list[Array] = []

    def allocate(_: int, rows: int) -> Array:
        gathered.append(np.empty(rows, np.uint8))
        return gathered[0]

    own = np.array([data.size], np.int64)
    context.changes += 1
    length_tensor, data_tensor = Tensor(own, DataType.INT64, (1,)), Tensor(data, DataType.UINT8, (data.size,))
    handles = [
        collectives.allgather("process_sets.length", None, [length_tensor], lambda _, rows: lengths),
        collectives.allgather("process_sets.change", None, [data_tensor], allocate),
    ]
    for handle in handles:
        handle.wait()
    ends = lengths.cumsum()
    return [
        _decode_change(gathered[0][end - length : end].tobytes())
        for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)
    ]


def assemble_set(
    context: Generation,
    group: int,
    ranks: Sequence[int],
    known: Mapping[int, Endpoint],
    mesh: Mesh,
    generation: str,
    config: Config,
) -> WorkerThread:
    """Connect to the other members and make this rank's worker of a set. Every member calls it.

    Args:
        ranks: the members, in set order.
        known: the endpoints of all members, by rank.
        generation: distinguishes these connections from those of other sets.
        config: the settings of this set.
    """
    nowhere = Endpoint(-1, "", 0, 0, (), "")
    endpoints = [known.get(rank, nowhere) for rank in range(context.identity.size)]
    deadline = time.monotonic() + config.start_timeout.total_seconds()

    def connect(keys: list[ConnectionKey]) -> dict[ConnectionKey, Connection]:
        return mesh.connect(endpoints, keys, generation, context.secret, deadline)

    tree = tree_of(ranks, endpoints, config)
    sockets = connect(control_connections(group, ranks, context.identity.rank, tree))
    try:
        return assemble(
            group,
            ranks,
            context.identity.rank,
            context.placement,
            endpoints,
            sockets,
            connect,
            config,
            context.watch,
            lambda *_: None,
            deadline,
            context.mpi,
            context.listener_settings(),
            context.observer,
        )
    except BaseException:
        for made in sockets.values():
            made.close()
        raise


def start_set(context: Generation, group: int, worker: WorkerThread) -> None:
    """Start the worker of a set that all members have made."""
    context.workers[group] = worker
    worker.start()
    # The job may have failed before this worker was listed, so nothing else would abort it. A rank that has left in good
    # order is no reason to abort: it need not be a member of this set.
    if context.termination.failure is not None:
        worker.abort(context.termination.failure)
