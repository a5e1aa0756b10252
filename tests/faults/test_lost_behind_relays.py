"""A rank is lost in a job of two hosts whose liveness goes through relays: whoever it is, all others hear of it, by name.

Ranks 0 and 1 say that they are on one host, ranks 2 to 5 on another; none can look at processes of the other host. Ranks 2
and 3 are the relays of 4 and 5.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest

from horovod._base import config
from ranks import Death, Pools, RankPool
from time_limits import SOON

HOSTS = "aabbbb"
SIZE = len(HOSTS)
LIMIT = SOON
SETTINGS = {config.RELAY_THRESHOLD: "0", config.TIMEOUT_SECONDS: "6"}


class Told(NamedTuple):
    """What a survivor saw.

    Attributes:
        text: of the error.
        links: the ranks that its monitor was connected with.
        left: what was left behind after ``shutdown()``.
    """

    text: str
    links: list[int]
    left: list[str]


def work(victim: int, number: int) -> Told:
    """Reduce until something happens."""
    import os

    import numpy as np

    from horovod.comm.datatypes import DataType
    from horovod.comm.reduction import ReduceOp
    from horovod.common import basics
    from horovod.control import mesh
    from horovod.control.channel import Channel
    from horovod.control.liveness_monitor import LivenessMonitor
    from horovod.control.liveness_tree import LivenessTree
    from horovod.core.errors import RankLostError
    from horovod.core.lifecycle import context, watching
    from horovod.core.requests.tensor import Tensor
    from horovod.core.submission import collectives
    from leaks import Inventory, left_behind

    rank = int(os.environ["HOROVOD_RANK"])
    os.environ["HOROVOD_HOSTNAME"] = HOSTS[rank]
    namespace = mesh.own_process_namespace()
    mesh.own_process_namespace = lambda: namespace + HOSTS[rank]  # type: ignore[attr-defined]
    links: list[int] = []

    class NotingMonitor(LivenessMonitor):
        def __init__(
            self, rank: int, tree: LivenessTree, channels: Mapping[int, Channel], *rest: Any, **more: Any
        ) -> None:
            links.extend(sorted(channels))
            super().__init__(rank, tree, channels, *rest, **more)

    watching.LivenessMonitor = NotingMonitor  # type: ignore[misc]
    before = Inventory.take()
    basics.init()
    watching.LivenessMonitor = LivenessMonitor  # type: ignore[misc]
    text = ""
    try:
        for step in range(10**6):
            array = np.ones(1000, np.float32)
            tensor = Tensor(array, DataType.FLOAT32, (1000,))
            collectives.allreduce("allreduce", f"step{step % 10}", [tensor], [tensor], op=ReduceOp.SUM).wait()
            if rank == victim and step == 20:
                signal.raise_signal(number)
    except RankLostError as error:
        text = str(error)
    context.shutdown()
    return Told(text, links, left_behind(before))


def check(victim: int, survivors: list[Told], reason: str) -> None:
    texts = {each.text for each in survivors}
    assert len(texts) == 1, texts
    assert re.match(rf"Horovod: rank {victim} \(host {HOSTS[victim]}, process \d+\) failed: ({reason})", *texts)
    assert [each.left for each in survivors] == [[]] * (SIZE - 1)
    links = [[1, 2, 3], [0], [0, 4, 5], [0, 4, 5], [2, 3], [2, 3]]
    assert [each.links for each in survivors] == [found for rank, found in enumerate(links) if rank != victim]


@pytest.mark.parametrize("victim", [0, 1, 2, 3, 4])
def test_a_rank_that_is_killed(ranks: Callable[..., RankPool], victim: int) -> None:
    results = ranks(SIZE, SETTINGS).run(work, victim, signal.SIGKILL, timeout=LIMIT, dies={victim})
    assert results[victim] == Death(-signal.SIGKILL)
    check(victim, [found for rank, found in enumerate(results) if rank != victim], "its process ended")


def test_a_rank_that_is_stopped(pools: Pools) -> None:
    """A relay, and a rank behind relays, in two jobs side by side, since they mostly wait."""
    made, calls = [], []
    try:
        for victim in (2, 3, 5):
            made.append(RankPool(SIZE, SETTINGS, None, pools.templates))
            made[-1].start(work, victim, signal.SIGSTOP, ranks=[victim])
            others = [rank for rank in range(SIZE) if rank != victim]
            calls.append((victim, made[-1].start(work, victim, signal.SIGSTOP, ranks=others)))
        for victim, call in calls:
            check(victim, call.results(LIMIT), "it no longer answers: its process is stopped")
    finally:
        for pool in made:
            pool.close()


def test_a_host_whose_relays_are_both_stopped(ranks: Callable[..., RankPool]) -> None:
    """The ranks behind them see it and cannot say so, and rank 0 waits ten times the timeout; both name one of the two."""
    pool = ranks(SIZE, {**SETTINGS, config.TIMEOUT_SECONDS: "1.5"})
    for victim in (2, 3):
        pool.start(work, victim, signal.SIGSTOP, ranks=[victim])
    survivors = [rank for rank in range(SIZE) if rank not in (2, 3)]
    found = dict(zip(survivors, pool.start(work, 2, signal.SIGSTOP, ranks=survivors).results(LIMIT), strict=True))
    for rank, reason in {0: "unreachable", 1: "unreachable", 4: "stopped", 5: "stopped"}.items():
        named = rf"Horovod: rank [23] \(host b, process \d+\) failed: it no longer answers: .*{reason}"
        assert re.match(named, found[rank].text), found[rank].text
    assert found[0].text == found[1].text
    assert [each.left for each in found.values()] == [[]] * 4
