"""The log of the trials: a CSV file with a line for each, and at the end one for what was chosen.

The first seven columns are those that existing tools read. Torus has no algorithm of its own here, so its column is always 0.
Source of these columns: the public interface that existing scripts rely on.
"""

from __future__ import annotations

from pathlib import Path

from horovod._base.config import MEBIBYTE
from horovod.comm.tuned import TunedSettings

HEADER = (
    "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms,tensor_fusion_threshold,score,"
    "bucket_bytes,shm_direct,engine"
)


def row(settings: TunedSettings, score: float, cached: bool, cycle_milliseconds: float) -> str:
    """One line: the threshold in MiB, the score in bytes a microsecond."""
    flags = f"{settings.hierarchical_allreduce:d},{settings.hierarchical_allgather:d},0, {cached:d}"
    sizes = f"{cycle_milliseconds:g},{settings.fusion_threshold / MEBIBYTE:g}"
    return f"{flags},{sizes},{score / 1e6:.6g},{settings.bucket_bytes},{settings.shm_direct},{settings.engine}"


class TrialLog:
    """The file while a job runs.

    Args:
        path: an existing file is replaced.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._path.write_text(HEADER + "\n")

    def add(self, line: str) -> None:
        """Append a line.

        Raises:
            OSError: it cannot be written.
        """
        with self._path.open("a") as file:
            file.write(line + "\n")
