"""Follows the elastic launcher that has started this process."""

from __future__ import annotations

from horovod.core.errors import HorovodInternalError
from horovod.core.lifecycle import elastic_process
from horovod.core.lifecycle.elastic_process import ElasticProcess
from horovod.elastic import rounds
from horovod.elastic.rounds import Reason
from horovod.elastic.updates import HostUpdateResult


class LaunchedRounds:
    """What the launcher says, as :class:`~horovod.elastic.rounds.Rounds` and :class:`~horovod.elastic.updates.HostUpdates`."""

    def __init__(self, process: ElasticProcess) -> None:
        self._process = process

    def next(self, reason: Reason) -> None:
        self._process.next(isinstance(reason, HorovodInternalError), str(reason))

    def poll(self) -> HostUpdateResult:
        return HostUpdateResult(self._process.take_news())


def connect() -> None:
    """Follow the elastic launcher, if there is one, and nobody has called :func:`~horovod.elastic.rounds.connect`."""
    process = elastic_process.this_process()
    if process is not None and not rounds.is_connected():
        launched = LaunchedRounds(process)
        rounds.connect(launched, launched)
