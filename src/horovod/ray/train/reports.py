"""``ray.train.report`` in an elastic job.

A report is a barrier of all of Ray's workers. While one is being replaced, no worker can pass it, and Ray's controller takes no
results. So reports of fewer ranks are skipped, and ranks that wait in one when a rank is lost are released.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray.train.v2._internal.execution.context import get_train_context
from ray.train.v2._internal.execution.train_fn_utils import DistributedTrainFnUtils

from horovod.core.lifecycle import context, elastic_process

_log = logging.getLogger("horovod.ray")
_PAUSE_SECONDS = 0.1
"""Between two attempts to release the barrier: a rank may come to it later than the others."""


class ElasticReports(DistributedTrainFnUtils):  # type: ignore[misc]  # Ray has no types here
    """What ``ray.train`` does for a training function."""

    def __init__(self) -> None:
        super().__init__()
        self._said = 0  # of which round
        self._left_out = False  # the last one

    def report(self, *arguments: Any, **keywords: Any) -> None:
        """``ray.train.report``. Left out if fewer ranks train than Ray has workers, on all of them alike."""
        process = elastic_process.this_process()
        if process is None or not context.is_initialized():
            super().report(*arguments, **keywords)
            self._left_out = False
            return
        generation, of_ray = context.current(), get_train_context()
        size, workers = generation.identity.size, of_ray.get_world_size()
        self._left_out = size < workers or generation.stopped is not None
        if self._left_out:
            if self._said != process.round:
                self._said = process.round
                _log.warning("ray.train.report is skipped while %d of %d workers train", size, workers)
            return
        reports = of_ray.report_call_index
        with _released_when_over(process):
            super().report(*arguments, **keywords)
        self._left_out = of_ray.report_call_index == reports  # Ray counts none that was released

    def finish(self) -> None:
        """Warn if Ray has no report of what the training function has ended with. Called when it has returned."""
        if self._left_out:
            _log.warning(
                "the last ray.train.report was skipped, so Ray's result is that of an earlier one, or None: before the last "
                "report, wait in hvd.elastic.run until all workers train, as examples/ray_train_elastic.py does"
            )


@contextmanager
def _released_when_over(process: elastic_process.ElasticProcess) -> Iterator[None]:
    """Release Ray's barrier once the round is over: a rank that is lost does not come to it."""
    done = threading.Event()
    actor: Any = get_train_context().get_synchronization_actor()

    def release() -> None:
        while not done.wait(_PAUSE_SECONDS):
            actor.reset.remote()

    def over(_: str) -> None:
        threading.Thread(target=release, name="horovod-ray-report", daemon=True).start()

    process.call_when_over(over)
    try:
        yield
    finally:
        done.set()
        process.call_when_over(None)
