"""Simulated jobs: a throughput that depends on the settings, and a clock."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from horovod.autotune.kept import Fit, Kept
from horovod.autotune.tuner import TunedJob, Tuner
from horovod.comm.tuned import TunedSettings

INITIAL = TunedSettings(128 << 20, 0, "shm", "auto", True, True)
BAD = TunedSettings(4096, 64 << 10, "tcp", "never", False, False)
STEP_BYTES = 100 << 20

Surface = Callable[[TunedSettings], float]
"""Bytes a second by settings."""


def surface(threshold: int, bucket: int, engine: str, direct: str, steepness: float) -> Surface:
    """A throughput that falls from one best point, by size in powers of two."""

    def speed(settings: TunedSettings) -> float:
        size = settings.bucket_bytes or 16 << 20
        away = abs(math.log2(max(1, settings.fusion_threshold)) - math.log2(threshold))
        away += min(20.0, abs(math.log2(size) - math.log2(bucket)))
        factor = 1 / (1 + steepness * away)
        factor *= 1.0 if settings.engine == engine else 0.7
        factor *= 1.0 if settings.shm_direct == direct else 0.9
        return 1e9 * factor

    return speed


class Notes:
    """Keeps in memory what a tuner writes."""

    def __init__(self, kept: Kept | None = None) -> None:
        self.file = kept
        self.trials: list[tuple[TunedSettings, float]] = []
        self.said: list[str] = []

    def kept(self, fit: Fit) -> Kept | None:
        return self.file

    def keep(self, kept: Kept) -> None:
        self.file = kept

    def trial(self, settings: TunedSettings, score: float) -> None:
        self.trials.append((settings, score))

    def say(self, text: str) -> None:
        self.said.append(text)


def job(
    initial: TunedSettings = INITIAL,
    hosts: tuple[int, ...] = (2,),
    explicit: frozenset[str] = frozenset(),
    warmup: int = 1,
    trials: int = 20,
) -> TunedJob:
    engines = ("shm", "tcp")
    return TunedJob("1", hosts, initial, explicit, engines, frozenset(engines), 4, warmup, trials, 0.8)


class Simulation:
    """Steps of a job with buckets of 25 MiB, and what its coordinator does with what is due.

    Args:
        noise: each collective's speed is off by up to this share.
        drift: the speed of the machine falls by up to this share and rises again, within ``period`` seconds.
    """

    def __init__(
        self,
        tuner: Tuner,
        initial: TunedSettings,
        speed: Surface,
        noise: float = 0.0,
        seed: int = 0,
        drift: float = 0.0,
        period: float = 60.0,
    ) -> None:
        self.tuner = tuner
        self.settings = initial
        self.changes: list[tuple[int, TunedSettings]] = []
        self._speed = speed
        self._noise = noise
        self._drift = drift
        self._period = period
        self._random = random.Random(seed)
        self._phase = self._random.random()
        self._now = 0.0
        self._step = 0

    def run(self, most: int = 5000) -> None:
        """Train until tuning is over."""
        while not self.tuner.over:
            assert self._step < most, "the search does not end"
            self.step()

    def step(self) -> None:
        """One step; settings change before its first collective is ordered, if at all."""
        self._step += 1
        for bucket in range(4):
            self.tuner.seen(f"bucket.{bucket}", STEP_BYTES // 4, [f"tensor.{bucket} float32 (1,)"], self._now)
            due = self.tuner.take()
            if due is not None:
                self.settings = due.settings
                self.changes.append((bucket, due.settings))
            speed = self._speed(self.settings) * (1 + self._noise * self._random.uniform(-1, 1))
            speed *= 1 - self._drift * (0.5 + 0.5 * math.sin(2 * math.pi * (self._now / self._period + self._phase)))
            self._now += STEP_BYTES / 4 / speed
