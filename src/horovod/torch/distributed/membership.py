"""Makes a process group a process set of the runtime.

The group of all ranks is the global process set. If the runtime runs on no rank, the group starts it, and also ends it unless
the script calls ``hvd.init()``, too. A group of some ranks is a process set that only its members make.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec

from horovod._base.process_identity import ProcessIdentity
from horovod.control.failure import RAISED
from horovod.core.errors import HorovodInternalError
from horovod.core.lifecycle import context, elastic_process
from horovod.core.lifecycle.generation import Generation
from horovod.core.lifecycle.rendezvous import user_secret
from horovod.core.lifecycle.steps_made import StepCount
from horovod.core.submission.process_sets_by_members import add_by_members
from horovod.environments import identity
from horovod.environments.horovodrun import HorovodRun
from horovod.observe.call_site import caller
from horovod.torch.distributed import failures
from horovod.torch.distributed.store import StoreExchange, StoreRendezvous

INIT = 'torch.distributed.init_process_group("horovod")'
NEW_GROUP = "torch.distributed.new_group()"
_ABORT_SECONDS = 5.0


class GroupMembership(NamedTuple):
    """A group as a process set of the runtime.

    Attributes:
        generation: the runtime.
        number: the number of the process set.
        own_rank: this rank's number in the group.
        ranks: the global ranks of the members, in the order of the group.
        store: the store of the default group.
        calls: the number of this rank's calls of the group, which the ranks compare when they leave.
        advice: the text of the error of calls while the runtime does not run; "": a usual one.
    """

    generation: Generation
    number: int
    own_rank: int
    ranks: Sequence[int]
    store: Any
    calls: StepCount
    advice: str = ""

    def check(self) -> None:
        """Check that the group's runtime still runs; after its end, another runtime may be running.

        Raises:
            HorovodInternalError: the group's runtime has ended.
            RuntimeError: it was that of an earlier round of an elastic job. Another round would not help.
        """
        if self.advice and not context.runs(self.generation):
            raise HorovodInternalError(self.advice)
        running = context.running()
        if running is not self.generation:
            raise self._ended()
        if running.stopped is not None:
            failures.note(running.stopped)

    def _ended(self) -> RuntimeError:
        if elastic_process.this_process() is not None:
            what = f"The process group of ranks {list(self.ranks)}" if self.number else "This default process group"
            make = "torch.distributed.new_group(), a device mesh" if self.number else INIT
            return RuntimeError(
                f"{what} ended with an earlier round of this job, whose ranks have changed. Make it in the training function "
                f"({make}), which hvd.elastic.run calls again in each round."
            )
        return HorovodInternalError(
            "the runtime of this process group was shut down, by hvd.shutdown() or the end of the default group. Call "
            f"torch.distributed.destroy_process_group(), and then {INIT} again."
        )


class _Standing(msgspec.Struct, array_like=True):
    """A rank's message to the others before the runtime starts.

    Attributes:
        generation, rank, size: of the runtime in the rank's process; 0, -1 and 0 if none runs.
        launched: the rank that horovodrun has given the process, if the job has as many ranks as the group; -1 otherwise.
    """

    generation: int
    rank: int
    size: int
    launched: int


_decode = msgspec.msgpack.Decoder(_Standing).decode

_stores: WeakKeyDictionary[Generation, Any] = WeakKeyDictionary()
"""The store of the default group, by runtime."""


def of_all_ranks(store: Any, rank: int, size: int, time_limit: timedelta) -> GroupMembership:
    """Make the default group: start the runtime, or share the one that runs. Every rank must call it.

    In an elastic job, a process that joins others calls it alone: then the launcher knows the ranks.

    Args:
        store: the store of the group.
        rank, size: this rank's number in the group, and the number of ranks.
        time_limit: how long to wait for the other ranks; also the time after which a collective that some ranks have not
            submitted ends the job, if the group starts the runtime and no setting says otherwise.

    Raises:
        ValueError: the runtime runs on some ranks only, or numbers the ranks differently; the message is the same on all ranks.
        TimeoutError, RuntimeError: the ranks did not find each other; the message names the missing ranks.
    """
    if elastic_process.this_process() is not None:
        context.init(identity, foundation=context.Foundation(None, time_limit))
        _check_numbers(rank, size, _own_standing(size))
        return of_runtime(context.current(), store)
    exchange = StoreExchange(store, rank, size, INIT)
    own = msgspec.msgpack.encode(_own_standing(size))
    standings = [_decode(each) for each in exchange.all_gather("standing", own, time_limit.total_seconds())]
    _check_alike(standings)
    if not standings[0].generation:
        launched_by_us = all(standing.launched == number for number, standing in enumerate(standings))
        if launched_by_us:
            context.init(identity, foundation=context.Foundation(None, time_limit))
        else:
            begin(exchange, rank, size, time_limit)
    exchange.end()
    return of_runtime(context.current(), store)


def of_runtime(generation: Generation, store: Any) -> GroupMembership:
    """The membership of the default group of a runtime that runs on all ranks.

    Args:
        store: the store of the group.
    """
    _stores[generation] = store
    return _membership(generation, 0, range(generation.identity.size))


def of_some_ranks(
    store: Any, rank: int, size: int, ranks: Sequence[int], time_limit: timedelta, description: str
) -> GroupMembership:
    """Make a group of some ranks. Every member must call it, and no other rank.

    Args:
        store: the store of the group.
        rank, size: this rank's number in the group, and the number of members.
        ranks: the global ranks of the members, in the order of the group.
        time_limit: how long to wait for the other members; also the time after which a collective that some members have not
            submitted ends the job, if no setting says otherwise.
        description: the group's description for error messages.

    Raises:
        TimeoutError, RuntimeError: a member is missing, or could not take part; the message says which and why.
        HorovodInternalError: the runtime does not run, or the job has failed.
    """
    running = context.running()
    context.meet(NEW_GROUP)

    def check() -> None:
        if running.stopped is not None:
            raise running.stopped.again()

    exchange = StoreExchange(store, rank, size, f"{NEW_GROUP} for {description}", check=check)

    def all_gather(subject: str, value: bytes) -> list[bytes]:
        return exchange.all_gather(subject, value, time_limit.total_seconds())

    number = add_by_members(ranks, all_gather, time_limit)
    exchange.end()
    generation = context.current()
    return _membership(generation, number, ranks)


def _membership(generation: Generation, number: int, ranks: Sequence[int]) -> GroupMembership:
    calls = generation.steps.of(f"torch.distributed.{number}", ranks, caller(), calls=True)
    return GroupMembership(
        generation, number, generation.workers[number].index, list(ranks), _stores[generation], calls
    )


def leave(membership: GroupMembership, reason: str) -> None:
    """End a group. Every member must call it. Does nothing if its runtime has ended.

    For the default group this ends the runtime, unless the script has called ``hvd.init()``, too.

    Args:
        reason: what this rank did, with "it" as the subject; errors of the other members quote it.
    """
    generation, number = membership.generation, membership.number
    if not context.is_initialized() or context.current() is not generation:
        return
    if number == 0:
        context.release()
        return
    if number in generation.workers:
        try:
            generation.end_worker(number, reason)
        except HorovodInternalError:
            pass  # the job has failed; calls of other groups raise that error


def _own_standing(size: int) -> _Standing:
    launched = -1
    if HorovodRun.detect(os.environ):
        found = identity()
        launched = found.rank if found.size == size else -1
    if not context.is_initialized():
        return _Standing(0, -1, 0, launched)
    running = context.current()
    return _Standing(running.generation, running.identity.rank, running.identity.size, launched)


def _check_alike(standings: Sequence[_Standing]) -> None:
    running = [rank for rank, standing in enumerate(standings) if standing.generation]
    if not running:
        return
    advice = "Call hvd.init() on all ranks before it, or on none."
    if len(running) < len(standings):
        silent = next(rank for rank in range(len(standings)) if rank not in running)
        raise ValueError(f"{INIT}: Horovod runs on rank {running[0]} and does not on rank {silent}. {advice}")
    for rank, standing in enumerate(standings):
        _check_numbers(rank, len(standings), standing)


def _check_numbers(rank: int, size: int, standing: _Standing) -> None:
    if standing.size != size:
        raise ValueError(
            f"{INIT}: Horovod runs with {standing.size} ranks, and the group has {size}. Make the group of all ranks, and "
            "torch.distributed.new_group() for some of them."
        )
    if standing.rank != rank:
        raise ValueError(
            f"{INIT}: rank {rank} of the group is rank {standing.rank} of the running Horovod. Give the group the same "
            "numbers: rank=hvd.rank(), world_size=hvd.size()."
        )


def begin(
    exchange: StoreExchange, rank: int, size: int, time_limit: timedelta, start_limit: timedelta | None = None
) -> None:
    """Start the runtime of a group whose ranks find each other through its store. Every rank must call it.

    Args:
        exchange: the exchange among these ranks.
        rank, size: this rank's number, and the number of ranks.
        time_limit: the time after which a collective that some ranks have not submitted ends the job, if no setting says
            otherwise.
        start_limit: how long the ranks may take to meet; None: as the settings say.

    Raises:
        ValueError: settings of the ranks differ.
        TimeoutError, RuntimeError: the ranks did not find each other; the message names the missing ranks.
    """
    rendezvous = StoreRendezvous(exchange, user_secret(os.environ, needed=False))
    context.init(lambda: identity_of(rank, size), foundation=context.Foundation(rendezvous, time_limit, start_limit))


def identity_of(rank: int, size: int) -> ProcessIdentity:
    """A rank of a group whose ranks know only their numbers."""
    return ProcessIdentity(
        rank=rank,
        size=size,
        local_rank=0,
        local_size=1,
        cross_rank=0,
        cross_size=1,
        hostname=socket.gethostname(),
        launcher="torch.distributed",
        job="",
        local_ranks_known=False,
    )


def abort(membership: GroupMembership, reason: str) -> None:
    """Fail the collectives that a group has in flight, on all of its members, and end the group."""
    generation, number = membership.generation, membership.number
    if not context.is_initialized() or context.current() is not generation:
        return
    rank = generation.identity.rank
    if number == 0:
        generation.watch.report(rank, reason, cause=RAISED)
        generation.termination.failed.wait(_ABORT_SECONDS)
        context.shutdown()
        return
    worker = generation.workers.pop(number, None)
    if worker is not None:
        worker.leave(reason)
        if not worker.join(_ABORT_SECONDS):
            worker.abort(HorovodInternalError(f"Horovod: rank {rank} ended the process group: {reason}"))
            worker.join(_ABORT_SECONDS)
        worker.close()
