"""The processor cores of a rank: those it computes with, and those its worker threads run on."""

from __future__ import annotations

import logging
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from horovod._base.config import THREAD_AFFINITY, THREADS

_log = logging.getLogger("horovod.core")


class CpuResources(msgspec.Struct, array_like=True):
    """The cores and threads that a rank computes with.

    Attributes:
        cores: the numbers of the cores that it may use.
        threads: how many threads it computes with.
    """

    host: str
    cores: list[int]
    threads: int


class CpuPlacement(NamedTuple):
    """The cores that this rank's worker threads run on.

    Attributes:
        core: they always run on this core; None: the operating system chooses.
        share: they run on one of these cores during a large collective. On a host where all cores compute, the operating
            system tends to wake the threads of two ranks on one core, where they delay each other. Empty: anywhere.
        spins: a thread that waits for a peer may poll before it sleeps: no other rank needs its core.
    """

    core: int | None = None
    share: frozenset[int] = frozenset()
    spins: bool = True

    def begin(self) -> None:
        """Pin the calling worker thread to its core, if it has one. Called once, at its start."""
        if self.core is not None and not _run_on({self.core}):
            _log.error("%s: core %d cannot be used, so it is ignored", THREAD_AFFINITY, self.core)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """A context in which the calling worker thread carries out a large collective."""
        before = os.sched_getaffinity(0) if self.share else set[int]()
        confined = bool(before) and _run_on(self.share)
        try:
            yield
        finally:
            if confined:
                _run_on(before)


ANYWHERE = CpuPlacement()


def own_cpu_resources(host: str) -> CpuResources:
    """The cores and threads of this process, from the operating system and the environment."""
    cores = sorted(os.sched_getaffinity(0))
    threads = os.environ.get(THREADS, "").split(",")[0]
    return CpuResources(host, cores, int(threads) if threads.isdecimal() and int(threads) else len(cores))


def crowded(cpu_resources_by_rank: Sequence[CpuResources]) -> bool:
    """Whether the ranks of some host compute with as many threads as it has cores, or more."""
    threads: Counter[str] = Counter()
    cores: defaultdict[str, set[int]] = defaultdict(set)
    for each in cpu_resources_by_rank:
        threads[each.host] += each.threads
        cores[each.host].update(each.cores)
    return any(threads[host] >= len(cores[host]) for host in threads)


def placement_of(cpu_resources_by_rank: Sequence[CpuResources], rank: int, core: int | None = None) -> CpuPlacement:
    """The cores for the worker threads of one rank.

    Args:
        core: the core that the user has chosen, or None.
    """
    spins = _has_a_core(cpu_resources_by_rank, rank)
    if core is not None or not crowded(cpu_resources_by_rank):
        return CpuPlacement(core, spins=spins)
    return CpuPlacement(share=_share(cpu_resources_by_rank, rank), spins=spins)


def _has_a_core(cpu_resources_by_rank: Sequence[CpuResources], rank: int) -> bool:
    """Whether this rank, and every rank that competes with it for cores, can have a core to itself."""
    local = [set(each.cores) for each in cpu_resources_by_rank if each.host == cpu_resources_by_rank[rank].host]
    wanted, sharers = set(cpu_resources_by_rank[rank].cores), list[set[int]]()
    while joining := [cores for cores in local if cores & wanted]:
        sharers += joining
        local = [cores for cores in local if not cores & wanted]
        wanted.update(*joining)
    taken: dict[int, int] = {}

    def assign(sharer: int, tried: set[int]) -> bool:
        """Give a rank a core, and move other ranks to other cores if necessary: a matching along augmenting paths."""
        for core in sharers[sharer] - tried:
            tried.add(core)
            if core not in taken or assign(taken[core], tried):
                taken[core] = sharer
                return True
        return False

    return len(sharers) <= len(wanted) and all(assign(sharer, set()) for sharer in range(len(sharers)))


def _share(cpu_resources_by_rank: Sequence[CpuResources], rank: int) -> frozenset[int]:
    """This rank's share of the cores if the ranks of a host may all use the same ones; empty if there are too few."""
    own = cpu_resources_by_rank[rank]
    sharers = [
        other for other, each in enumerate(cpu_resources_by_rank) if each.host == own.host and each.cores == own.cores
    ]
    position, each, cores = sharers.index(rank), len(sharers), len(own.cores)
    if each == 1 or each > cores:
        return frozenset()
    return frozenset(own.cores[position * cores // each : (position + 1) * cores // each])


def _run_on(cores: Set[int]) -> bool:
    """Pin the calling thread to these cores; False, and nothing has changed, if they cannot be used."""
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        _log.debug("cores %s: %s", sorted(cores), error)
        return False
    return True
