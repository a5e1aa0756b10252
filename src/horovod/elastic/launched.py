"""Follows the elastic launcher that has started this process."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from horovod._base.config import goes_on
from horovod.core.errors import HorovodInternalError, MismatchError, RepeatedFailureError
from horovod.core.lifecycle import context, elastic_process
from horovod.core.lifecycle.elastic_process import ElasticProcess
from horovod.elastic import rounds
from horovod.elastic.rounds import Reason
from horovod.elastic.updates import HostUpdateResult

_log = logging.getLogger("horovod.elastic")


class LaunchedRounds:
    """The launcher's messages, as :class:`~horovod.elastic.rounds.Rounds` and :class:`~horovod.elastic.updates.HostUpdates`."""

    def __init__(self, process: ElasticProcess) -> None:
        self._process = process

    def next(self, reason: Reason, *, has_state: bool, keeps_state: bool) -> None:
        self._process.has_state = self._process.has_state or has_state
        final = isinstance(reason, MismatchError | RepeatedFailureError)
        failed = isinstance(reason, HorovodInternalError)
        line = reason.call_sites.get(self._process.rank, "") if isinstance(reason, HorovodInternalError) else ""
        self._process.next(failed, str(reason), final, keeps_state=keeps_state, line=line)

    def same_state(self) -> bool:
        return self._process.same_state

    def poll(self) -> HostUpdateResult:
        return HostUpdateResult(self._process.take_news())


def connect() -> None:
    """Follow the elastic launcher, if there is one and the script has not called :func:`~horovod.elastic.rounds.connect`."""
    process = elastic_process.this_process()
    if process is not None and not rounds.is_connected():
        launched = LaunchedRounds(process)
        process.has_state = False
        rounds.connect(launched, launched)
        _leave_when_asked_to_end(process)


@contextmanager
def in_run() -> Iterator[ElasticProcess | None]:
    """A call of ``hvd.elastic.run``. Yields this process as one of an elastic job; None in any other job."""
    process = elastic_process.this_process()
    if process is None:
        yield None
        return
    if goes_on(os.environ):
        raise ValueError("hvd.elastic.run: --on-loss continue is for scripts without it. Leave it out.")
    process.enters_run()
    context.enter_run()
    try:
        yield process
    finally:
        process.leaves_run()


def _leave_when_asked_to_end(process: ElasticProcess) -> None:
    """Make SIGTERM leave the job at the next commit. A script that handles SIGTERM itself keeps its handler."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return

    def leave() -> None:
        if process.leave():
            _log.warning("asked to end (SIGTERM): this process leaves the job at its next commit")
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_signal(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the next one ends this process at once
        if os.getpid() != process.launched:
            os.kill(os.getpid(), signal.SIGTERM)  # a forked child, such as a loader of data
            return
        threading.Thread(target=leave, name="horovod-leave", daemon=True).start()

    signal.signal(signal.SIGTERM, on_signal)
