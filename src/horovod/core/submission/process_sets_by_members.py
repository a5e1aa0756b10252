"""Adds process sets that only their members know, for bindings whose groups are made without the other ranks.

The members exchange their endpoints through the caller's function, and take a number that none of them uses. It is far above
those of the sets that all ranks know, which :mod:`horovod.core.submission.dynamic_process_sets` numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import msgspec

from horovod.control.mesh import Endpoint, Mesh
from horovod.core.lifecycle.context import running
from horovod.core.submission.dynamic_process_sets import assemble_set, start_set

AllGather = Callable[[str, bytes], list[bytes]]
"""``all_gather(subject, value)``: every member gives a value, and gets those of all, in the order of the set."""


class _Proposal(msgspec.Struct, array_like=True):
    """One member's message about a new set: a number that is free there, and the member's endpoint."""

    number: int
    endpoint: Endpoint


_decode = msgspec.msgpack.Decoder(_Proposal).decode


def add_by_members(ranks: Sequence[int], all_gather: AllGather, time_limit: timedelta) -> int:
    """Make a process set of global ranks, in this order; returns its number. Every member must call it, and no other rank.

    Args:
        time_limit: the time after which a collective that some members have not submitted ends the job; the user's settings
            come first.

    Raises:
        RuntimeError: a member could not connect, or start what the set needs; the message says which and why, on all members.
        HorovodInternalError: the runtime does not run, or the job has failed meanwhile.
    """
    context = running()
    identity = context.identity
    config = context.config.limited_to(time_limit)
    mesh = Mesh(identity.rank, identity.hostname, identity.local_size == identity.size, config.network_interfaces)
    worker, failure = None, None
    try:
        mesh.keep_to(context.addresses)
        own = msgspec.msgpack.encode(_Proposal(context.last_by_members + 1, mesh.endpoint))
        proposals = [_decode(each) for each in all_gather("endpoints", own)]
        number = context.last_by_members = max(proposal.number for proposal in proposals)
        known = {proposal.endpoint.rank: proposal.endpoint for proposal in proposals}
        try:
            worker = assemble_set(context, number, ranks, known, mesh, f"{context.generation}.{number}", config)
        except Exception as error:
            failure = error
    finally:
        mesh.close()
    obstacle = "" if failure is None else f"{type(failure).__name__}: {failure}"
    try:
        said = [each.decode() for each in all_gather("outcomes", obstacle.encode())]
        obstacles = [f"rank {rank}: {each}" for rank, each in zip(ranks, said, strict=True) if each]
        if obstacles:
            raise RuntimeError(f"The process set {list(ranks)} could not be made: {'; '.join(obstacles)}") from failure
    except BaseException:
        if worker is not None:
            worker.close()
        raise
    assert worker is not None
    worker.registration = number
    start_set(context, number, worker)
    return number
