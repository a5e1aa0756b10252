"""The process set of the ranks of this host, for what ranks of one host do among themselves."""

from __future__ import annotations

from horovod.core.lifecycle.context import current
from horovod.core.lifecycle.process_set import ProcessSet, membership
from horovod.core.submission.dynamic_process_sets import add_apart

_own = ProcessSet([])


def present_host() -> ProcessSet:
    """What :func:`host_process_set` returns, without a number and ranks before its first call in a generation. It communicates
    nothing."""
    if membership.ranks.get(-1 if _own.process_set_id is None else _own.process_set_id) != _own.ranks:
        _own.ranks, _own.process_set_id = [], None
    return _own


def host_process_set() -> ProcessSet:
    """The ranks of this rank's host as a registered process set: those with the same ``cross_rank`` or host name.

    Every rank of the job must call it. The first call in a generation makes the sets of all hosts, in one exchange. Later calls
    communicate nothing. It needs no ``process_sets="dynamic"``. A job on one host gets a set of all ranks.

    Returns:
        One and the same object in every generation, with the ranks of the present one.

    Raises:
        ValueError: not initialised.
        RuntimeError: ranks of a host could not connect, and nothing has changed on any rank; or the process has joined an
            elastic job, and has not entered ``hvd.elastic.run``.
        HorovodInternalError: the job has failed meanwhile.
    """
    context = current()
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(context.hosts):
        by_host.setdefault(host, []).append(rank)
    known = list(membership.ranks.values())
    new = [ProcessSet(ranks) for ranks in by_host.values() if ranks not in known]  # all ranks know the same sets
    if new:
        add_apart(context, new)
    mine = by_host[context.hosts[context.identity.rank]]
    _own.ranks = list(mine)
    _own.process_set_id = next(number for number, ranks in membership.ranks.items() if ranks == mine)
    return _own
