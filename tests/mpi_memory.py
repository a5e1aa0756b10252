"""The shared memory that MPI leaves behind where a rank is killed: its files have fixed places, and names without a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

_FOLDER = Path("/dev/shm")
_PATTERNS = ("mpich_shm_*", "sm_segment.*")


def _found() -> Iterator[Path]:
    for pattern in _PATTERNS:
        yield from _FOLDER.glob(pattern)


def _mapped() -> str:
    """The memory maps of all processes that we may look at."""
    texts = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            texts.append(maps.read_text())
    return "".join(texts)


def remover() -> Callable[[], None]:
    """What removes such files of our own that are made from now on, except for those that a process still uses."""
    before = set(_found())

    def remove() -> None:
        left = [path for path in _found() if path not in before]
        mapped = _mapped() if left else ""
        for path in left:
            if str(path) not in mapped:
                with suppress(OSError):
                    path.unlink()

    return remove
