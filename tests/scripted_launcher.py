"""Plays an elastic launcher, for tests of what happens inside ranks when others come and go."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from horovod._base import config
from horovod.common import basics
from horovod.common.elastic import HostUpdateResult, connect, disconnect


class ScriptedLauncher:
    """An elastic launcher for the ranks of a pool: knows which processes each round consists of.

    A block in which the process follows it. It begins with the ranks of the first round; the block calls ``init()``.

    Args:
        rounds: of each, the numbers that its processes have in the pool, in the order of their ranks.
        shutdown: the binding's.

    Attributes:
        number: of the round that runs, from 0.
        process: this process's number in the pool.
        news: what the script is told at its next check, if this is rank 0.
    """

    def __init__(self, rounds: list[list[int]], shutdown: Callable[[], None] = basics.shutdown) -> None:
        self.shutdown = shutdown
        self.rounds = rounds
        self.number = -1
        self.process = int(os.environ[config.RANK])
        self.news = HostUpdateResult.no_update
        self.before = dict(os.environ)

    def next(self, reason: Any, *, has_state: bool = False, keeps_state: bool = False) -> None:
        before = self.rounds[self.number] if self.number >= 0 else []
        self.number += 1
        members = self.rounds[self.number]
        self._same_state = keeps_state and set(members) <= set(before)  # all ranks of a test are interrupted together
        if self.process not in members:
            raise SystemExit(0)
        for name in (config.RANK, config.LOCAL_RANK):
            os.environ[name] = str(members.index(self.process))
        for name in (config.SIZE, config.LOCAL_SIZE):
            os.environ[name] = str(len(members))

    def same_state(self) -> bool:
        return self._same_state

    def poll(self) -> HostUpdateResult:
        news, self.news = self.news, HostUpdateResult.no_update
        return news

    def __enter__(self) -> ScriptedLauncher:
        self.next(None)
        connect(self, self)
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        disconnect()
        os.environ.clear()
        os.environ.update(self.before)
