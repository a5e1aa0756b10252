"""Starts and stops the timeline while a generation runs. Rank 0 writes it. If it shows all ranks, the others send what they
do by :mod:`horovod.core.lifecycle.progress_reports`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from horovod._base.config import DYNAMIC, TIMELINE, Config
from horovod.core.worker.observer import Observer
from horovod.observe import host_system
from horovod.observe.all_ranks import AllRanksTimeline, TimelinePart
from horovod.observe.timeline import Timeline

_log = logging.getLogger("horovod.core")


class Recording:
    """The timeline of one generation, while one is being written.

    Args:
        rank: this rank.
        observer: gets the timeline; the process sets that this rank coordinates are recorded.

    Attributes:
        of_all_ranks: whether the timeline shows all ranks.
    """

    def __init__(self, config: Config, rank: int, observer: Observer) -> None:
        self._config = config
        self._rank = rank
        self._observer = observer
        self._all_ranks: AllRanksTimeline | None = None
        self.of_all_ranks = config.timeline_all_ranks and bool(config.timeline)
        self._hosts: Sequence[str] = ()
        self._lock = threading.RLock()

    def begin(self, hosts: Sequence[str]) -> None:
        """Start recording if the environment names a file.

        Args:
            hosts: by rank, for timelines of all ranks.
        """
        self._hosts = hosts
        if self._config.timeline and self._config.timeline.upper() != DYNAMIC:
            self.start(self._config.timeline, self._config.timeline_mark_cycles)

    def start(self, path: str, mark_cycles: bool) -> None:
        """Write a timeline to ``path`` from now on. Does nothing if one is being written there already.

        A file that cannot be written is logged as an error.

        Raises:
            ValueError: HOROVOD_TIMELINE was not set when Horovod was initialised.
        """
        if not self._config.timeline:
            raise ValueError(f"Set {TIMELINE}={DYNAMIC} to enable dynamic timeline usage.")
        present = self._all_ranks or self._observer.timeline
        if self._rank != 0 or (present is not None and present.path == path):
            return
        with self._lock:
            try:
                if self.of_all_ranks:
                    all_ranks = AllRanksTimeline(path, self._hosts, time.monotonic(), host_system.boot_id())
                    self.stop()
                    self._all_ranks = all_ranks
                    return
                timeline = Timeline(path, mark_cycles)
            except OSError as error:
                _log.error("the timeline %s cannot be written: %s", path, error)
                return
            self.stop()
            self._observer.timeline = timeline

    def add(self, rank: int, part: TimelinePart, received: float) -> None:
        """Write a part of a rank, if a timeline of all ranks is being written."""
        with self._lock:
            timeline = self._all_ranks
            if timeline is None:
                return
            try:
                timeline.add(rank, part, received)
            except OSError as error:
                _log.error("the timeline %s cannot be written any more: %s", timeline.path, error)
                self.stop()

    def stop(self) -> None:
        """Complete the file, if one is being written."""
        with self._lock:
            all_ranks, self._all_ranks = self._all_ranks, None
            if all_ranks is not None:
                all_ranks.close()
            timeline, self._observer.timeline = self._observer.timeline, None
            if timeline is not None:
                timeline.close()
