"""The search space of a job: the settings to tune, and their values. Pure."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence

import msgspec

from horovod._base.config import (
    BUCKET_BYTES,
    FUSION_THRESHOLD,
    HIERARCHICAL_ALLGATHER,
    HIERARCHICAL_ALLREDUCE,
    SHM_DIRECT,
)
from horovod.comm.tuned import TunedSettings

Value = int | str | bool

_KIB = 1 << 10
FUSION_THRESHOLDS = (4 * _KIB, 64 * _KIB, 1024 * _KIB, 4 << 20, 16 << 20, 32 << 20, 64 << 20, 128 << 20, 256 << 20)
BUCKETS = (64 * _KIB, 256 * _KIB, 1 << 20, 4 << 20, 16 << 20, 64 << 20, sys.maxsize)
"""In bytes; the last has all gradients in one bucket."""
DIRECT = ("auto", "always", "never")

_VARIABLES = {
    "fusion_threshold": FUSION_THRESHOLD,
    "bucket_bytes": BUCKET_BYTES,
    "shm_direct": SHM_DIRECT,
    "hierarchical_allreduce": HIERARCHICAL_ALLREDUCE,
    "hierarchical_allgather": HIERARCHICAL_ALLGATHER,
}
"""By setting, the environment variable with which the user fixes it."""

_POINTS = ((128 << 20, sys.maxsize), (128 << 20, 16 << 20), (32 << 20, 4 << 20), (16 << 20, 16 << 20))
"""Thresholds and buckets to try first: the defaults, and values that are often good."""
OF_DEFAULTS = 2
"""How many of these are the defaults: with no core to spare, and with some."""


class Space:
    """The settings that are searched, each with its values; the others stay as they are.

    Args:
        choices: by field of :class:`TunedSettings`, its values in order.
    """

    def __init__(self, choices: Mapping[str, Sequence[Value]]) -> None:
        self.choices = {name: tuple(values) for name, values in choices.items() if len(values) > 1}

    @property
    def size(self) -> int:
        """How many combinations there are."""
        size = 1
        for values in self.choices.values():
            size *= len(values)
        return size

    def at(self, base: TunedSettings, point: Mapping[str, Value]) -> TunedSettings:
        """``base`` with the searched settings as at a point."""
        return msgspec.structs.replace(base, **{name: value for name, value in point.items() if name in self.choices})

    def first_points(self, default: TunedSettings) -> list[dict[str, Value]]:
        """The points to try first.

        Args:
            default: what holds where autotuning is off.
        """
        points: list[dict[str, Value]] = []
        for threshold, bucket in _POINTS:
            wanted: dict[str, Value] = {**msgspec.structs.asdict(default)}
            wanted.update(fusion_threshold=threshold, bucket_bytes=bucket)
            point = {
                name: wanted[name] if wanted[name] in values else values[0] for name, values in self.choices.items()
            }
            if point not in points:
                points.append(point)
        return points


def adapted(
    settings: TunedSettings, base: TunedSettings, explicit: Collection[str], engines: Sequence[str]
) -> TunedSettings:
    """The settings of another job that this one can use; the rest is as in ``base``."""
    fixed: dict[str, Value] = {
        name: getattr(base, name) for name, variable in _VARIABLES.items() if variable in explicit
    }
    if settings.engine not in engines:
        fixed["engine"] = base.engine
    return msgspec.structs.replace(settings, **fixed)


def searched(explicit: Collection[str], engines: Sequence[str], parts: Collection[str], recuts: bool) -> Space:
    """The search space of a job.

    Args:
        explicit: the variables that the user has set.
        engines: between which the ranks can choose, the best first.
        parts: the engines that these are composed of.
        recuts: whether an optimizer can cut its buckets again.
    """
    choices: dict[str, Sequence[Value]] = {"fusion_threshold": FUSION_THRESHOLDS, "engine": engines}
    if recuts:
        choices["bucket_bytes"] = BUCKETS
    if "shm" in parts:
        choices["shm_direct"] = DIRECT
    if "hierarchical" in parts:
        choices["hierarchical_allreduce"] = choices["hierarchical_allgather"] = (True, False)
    return Space({name: values for name, values in choices.items() if _VARIABLES.get(name) not in explicit})
