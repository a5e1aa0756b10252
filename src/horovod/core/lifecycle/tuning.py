"""Autotuning of one generation: what it may tune, and what rank 0 writes to files and the log.

The settings of the global process set are tuned (:mod:`horovod.autotune`); other sets keep those that the job begins with.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from horovod._base.config import AUTOTUNE, AUTOTUNE_FILE, AUTOTUNE_LOG, Config, user_cache
from horovod._base.version import VERSION
from horovod.autotune import best_settings, kept, log
from horovod.autotune.kept import Fit, Kept, KeptFileError
from horovod.autotune.search import why_not
from horovod.autotune.tuner import TunedJob, Tuner
from horovod.comm.base import Communicator
from horovod.comm.tuned import TunedSettings

_log = logging.getLogger("horovod.core")


def check(config: Config) -> None:
    """Whether this rank could tune. Every rank checks, since in an elastic job each may become rank 0.

    Raises:
        ImportError: this rank lacks a package; the message says what to install.
    """
    if config.autotune and (reason := why_not()):
        raise ImportError(f"{AUTOTUNE} is set, but this rank cannot tune: {reason}.")


def initial_settings(config: Config, communicator: Communicator) -> TunedSettings:
    """The settings that ``init()`` has started with."""
    return TunedSettings(
        config.fusion_threshold,
        config.bucket_bytes,
        communicator.name,
        config.shm_direct,
        config.hierarchical_allreduce is not False,
        config.hierarchical_allgather is not False,
    )


def make_tuner(config: Config, communicator: Communicator, hosts: Sequence[str], recuts: Callable[[], bool]) -> Tuner:
    """The tuner of rank 0.

    Args:
        communicator: the communicator of the global process set.
        hosts: by rank, its host.
        recuts: see :class:`Tuner`.
    """
    job = TunedJob(
        VERSION,
        tuple(Counter(hosts).values()),
        initial_settings(config, communicator),
        config.explicit,
        tuple(communicator.alternatives()),
        frozenset(communicator.engines()),
        config.autotune_steps,
        config.autotune_warmup,
        config.autotune_trials,
        config.autotune_noise,
    )
    return Tuner(job, best_settings.known, recuts, _Files(config))


class _Files:
    """The results of a tuner, in the files that the user names and in the log."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._file: Path | None = Path(config.autotune_file) if config.autotune_file else None
        self._foreign = False  # the file has content that autotuning has not written
        self._log: log.TrialLog | None = None
        if config.autotune_log:
            try:
                self._log = log.TrialLog(config.autotune_log)
            except OSError as error:
                _log.error("%s=%s cannot be written: %s", AUTOTUNE_LOG, config.autotune_log, error)

    def kept(self, fit: Fit) -> Kept | None:
        if self._file is None:
            self._file = kept.default_path(fit, *user_cache())
        try:
            return kept.read(self._file)
        except (OSError, KeptFileError) as error:
            self._foreign = bool(self._config.autotune_file) and isinstance(error, KeptFileError)
            _log.warning("autotuning cannot use the settings that an earlier run saved: %s", error)
            return None

    def keep(self, found: Kept) -> None:
        assert self._file is not None, "kept() was called first"
        if self._foreign:
            return  # as the warning of kept() says
        try:
            kept.write(self._file, found)
        except OSError as error:
            _log.warning("autotuning cannot save its choice (%s): name another file with %s", error, AUTOTUNE_FILE)

    def trial(self, settings: TunedSettings, score: float) -> None:
        if self._log is None:
            return
        milliseconds = self._config.cycle_time.total_seconds() * 1e3
        try:
            self._log.add(log.row(settings, score, self._config.cache_capacity > 0, milliseconds))
        except OSError as error:
            _log.error("%s=%s cannot be written any more: %s", AUTOTUNE_LOG, self._config.autotune_log, error)
            self._log = None

    def say(self, text: str) -> None:
        where = f" (kept in {self._file})" if "is over" in text and self._file is not None else ""
        _log.warning("%s%s", text, where)
