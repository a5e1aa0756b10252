"""Decides on rank 0 which settings the job runs with. Pure: files and messages are the caller's.

    look       until tensors recur, which identify the job; settings of an earlier run of it are used without a search
    warm up    trials that are not counted
    search     trials with different settings (:mod:`horovod.autotune.search`)
    over       the best settings stay

Settings change with an order: :attr:`Tuner.due` is what the next one is to carry. All ranks then change at the same collective.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from horovod._base.config import MEBIBYTE
from horovod.autotune.kept import Fit, Kept, Tuned, digest
from horovod.autotune.measuring import Meter, Recurring
from horovod.autotune.search import Search
from horovod.autotune.space import Space, adapted, searched
from horovod.comm.tuned import TunedSettings


@dataclass(frozen=True)
class TunedJob:
    """Facts about the job that the tuner needs.

    Attributes:
        version: of this package.
        hosts: how many ranks each host has.
        initial: the settings that ``init()`` has begun with.
        explicit: the variables that the user has set.
        engines: between which the ranks can choose; ``parts``: what these are composed of.
        steps, warmup, trials, noise: the user's settings.
    """

    version: str
    hosts: tuple[int, ...]
    initial: TunedSettings
    explicit: frozenset[str]
    engines: tuple[str, ...]
    parts: frozenset[str]
    steps: int
    warmup: int
    trials: int
    noise: float


class Records(Protocol):
    """Stores the tuner's results. No method raises."""

    def kept(self, fit: Fit) -> Kept | None:
        """The settings that an earlier run has kept for this job, or for another one in the file that the user names."""

    def keep(self, kept: Kept) -> None:
        """Keep the best settings for the next run."""

    def trial(self, settings: TunedSettings, score: float) -> None:
        """Log one trial, or at the end the choice."""

    def say(self, text: str) -> None:
        """Tell the user."""


class Tuner:
    """Tunes one generation.

    Args:
        remembered: what this process knows from an earlier generation.
        recuts: whether an optimizer of this process cuts its buckets again when asked to; asked once tensors are known.

    Attributes:
        due: the settings that the next order must carry; None: none.
        over: whether no further settings will be due.
    """

    def __init__(self, job: TunedJob, remembered: Kept | None, recuts: Callable[[], bool], records: Records) -> None:
        self._job = job
        self._remembered = remembered
        self._recuts = recuts
        self._records = records
        self._start = self._present = job.initial
        self._recurring: Recurring | None = Recurring(max(2, job.steps // 2))
        self._meter = Meter(job.steps)
        self._warmup = job.warmup
        self._search: Search | None = None
        self._fit: Fit | None = None
        self._kept: Kept | None = None
        self._over = False
        self.due: Tuned | None = None
        if remembered is not None:
            self._start = adapted(remembered.settings, job.initial, job.explicit, job.engines)
            self._change(self._start)

    @property
    def looking(self) -> bool:
        """Whether :meth:`seen` wants to know the tensors of a collective."""
        return self._recurring is not None

    @property
    def over(self) -> bool:
        return self._over and self.due is None

    def take(self) -> Tuned | None:
        """The settings that are due, for an order that is sent now."""
        due, self.due = self.due, None
        if due is not None:
            self._present = due.settings
        return due

    def interrupt(self) -> None:
        """Do not count the present measurement: not all ranks train."""
        self._meter.interrupt()

    def seen(self, name: str, nbytes: int, tensors: Iterable[str], now: float) -> None:
        """This rank submits a collective.

        Args:
            tensors: its tensors with types and shapes; only needed while :attr:`looking`.
            now: in seconds.
        """
        if self._recurring is not None:
            for tensor in tensors:
                self._recurring.seen(tensor)
            if self._recurring.most() < max(2, self._job.steps):
                return
            self._begin(self._recurring.found())
            self._recurring = None
        if self._over:
            return
        score = self._meter.seen(name, nbytes, now)
        if score is not None:
            self._trial_ended(score)
            self._meter.seen(name, nbytes, now)  # it is the first of the next trial

    def _begin(self, tensors: list[str]) -> None:
        """Called once the tensors are known: use the settings of an earlier run, or begin to search."""
        job = self._job
        space = searched(job.explicit, job.engines, job.parts, self._recuts())
        decided = [f"{name} {value}" for name, value in msgspec.structs.asdict(job.initial).items()]
        searching = [f"{name} {values}" for name, values in sorted(space.choices.items())]
        self._fit = fit = Fit(job.version, sum(job.hosts), job.hosts, digest(tensors), digest(decided + searching))
        kept = self._records.kept(fit)
        if kept is None or (self._remembered is not None and self._remembered.fit == fit):
            kept = self._remembered or kept
        if kept is not None and kept.fit == fit and kept.finished:
            self._kept, self._over = kept, True
            self._change(kept.settings)
            self._records.say(
                f"autotuning uses the settings that an earlier run found: {self._describe(space, kept.settings)}"
            )
            return
        if kept is not None and kept is not self._remembered and kept.fit == fit:
            self._start = adapted(kept.settings, job.initial, job.explicit, job.engines)
        elif kept is not None and kept is not self._remembered:
            self._records.say(
                f"autotuning ignores the saved settings: they were found for a different job "
                f"({fit.differences(kept.fit)})"
            )
        self._search = Search(space, self._start, job.initial, job.trials if space.choices else 0, job.noise)
        if not self._warmup:
            self._next()
        else:
            self._change(self._start)

    def _trial_ended(self, score: float) -> None:
        assert self._search is not None
        if self._warmup:
            self._warmup -= 1
            if self._warmup:
                return
        else:
            best = self._search.best
            self._search.tell(score)
            self._records.trial(self._present, score)
            if self._search.best != best or self._kept is None:
                self._keep(finished=False)
        self._next()

    def _next(self) -> None:
        assert self._search is not None
        settings = self._search.ask()
        if settings is None:
            self._end(self._search)
        else:
            self._change(settings)

    def _end(self, search: Search) -> None:
        best = search.best
        self._over = True
        self._keep(finished=True)
        self._change(best)
        if not search.measured:
            self._records.say("autotuning has nothing to choose between")
            return
        self._records.trial(best, search.speed(best))
        chosen = self._describe(search.space, best)
        speed = f"{search.speed(best) / 1e6:.0f} MB/s"
        gained = (
            f"{search.gain:.0%} faster than what the job began with"
            if search.gain > 0
            else "what the job began with is the best"
        )
        self._records.say(f"autotuning is over after {search.measured} settings: {chosen}; {speed}, {gained}")

    def _keep(self, finished: bool) -> None:
        assert self._search is not None and self._fit is not None
        self._kept = Kept(self._fit, self._search.best, finished, self._search.gain)
        if self._search.measured:
            self._records.keep(self._kept)

    def _change(self, settings: TunedSettings) -> None:
        """Change the settings of all ranks, if they differ, and begin a trial."""
        changed = settings != self._present or self._over
        self.due = Tuned(settings, self._kept or self._remembered) if changed else None
        self._meter.restart()

    @staticmethod
    def _describe(space: Space, settings: TunedSettings) -> str:
        """The settings that were searched."""
        shown = [
            f"{name.replace('_', ' ')} {_shown(getattr(settings, name), name)}"
            for name in TunedSettings.__struct_fields__
            if name in space.choices
        ]
        return ", ".join(shown) or "nothing"


def _shown(value: object, name: str) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if not isinstance(value, int):
        return str(value)
    if name == "bucket_bytes" and value in (0, sys.maxsize):
        return "as the optimizer decides" if value == 0 else "unlimited"
    return f"{value / MEBIBYTE:g} MiB"
