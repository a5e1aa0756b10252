"""The order in which the files of tests run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePath

WAITING = ("cluster", "faults", "unit/comm/tcp", "unit/control", "unit/core/engines", "unit/runner")
"""Folders whose tests wait more than they compute: for hosts, and for limits that pass."""
SHORT = ("unit",)
"""Folders whose tests are short. They come last, so that all processes of pytest end at about the same time."""


def places(files: Iterable[str]) -> Mapping[str, float]:
    """By file, its place in a run: files that wait are spread among those that compute, so the cores have work all the time.

    Args:
        files: paths below the root of the project, in order; a path may appear several times.
    """
    found: dict[str, float] = {}
    rest: list[str] = []
    waiting: list[str] = []
    for file in dict.fromkeys(files):
        if _is_in(file, WAITING):
            waiting.append(file)
        elif _is_in(file, SHORT):
            found[file] = 1
        else:
            rest.append(file)
    for some in waiting, rest:
        found.update((file, (index + 0.5) / len(some)) for index, file in enumerate(some))
    return found


def _is_in(file: str, folders: Iterable[str]) -> bool:
    """Whether a file of tests is in one of the folders, at any depth."""
    within = PurePath(*PurePath(file).parts[1:])
    return any(within.is_relative_to(each) for each in folders)
