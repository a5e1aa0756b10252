"""``horovod.runner.common.util.env``: this process's rank, and which variables reach other hosts; an import path that scripts
use."""

from __future__ import annotations

import os
import re

from horovod._base import config
from horovod.runner.worker_environment import NOT_FORWARDED

_LAUNCHERS = (
    (config.RANK, config.SIZE),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def is_exportable(v: str) -> bool:
    """Whether ranks on other hosts get a variable of this name from the launcher's environment."""
    return re.match(NOT_FORWARDED, v) is None


def get_env_rank_and_size() -> tuple[int, int]:
    """The rank and size that a launcher has given this process, before ``hvd.init()``; 0 and 1 if none has.

    Raises:
        RuntimeError: there is only one of the two variables.
    """
    for rank, size in _LAUNCHERS:
        values = os.environ.get(rank), os.environ.get(size)
        if values[0] is not None and values[1] is not None:
            return int(values[0]), int(values[1])
        if values != (None, None):
            there, missing = (rank, size) if values[1] is None else (size, rank)
            raise RuntimeError(f"environment variable {there} is set, and {missing} is not: set both, or neither")
    return 0, 1
