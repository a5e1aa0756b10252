"""What a piece of work left behind in this process: Python threads, child processes, open descriptors.

Used around every test in pytest's own process, and on request inside the ranks of a pool.
"""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path

import psutil

from time_limits import SOON

HARMLESS = re.compile(r"/dev/(urandom|null|tty|pts/)|/proc/\d+/cmdline$")
"""What descriptors refer to that libraries open once and keep; TensorFlow 2.16 does so with a command line."""


@dataclass(frozen=True)
class Inventory:
    """What exists at one moment.

    Attributes:
        threads: by identifier, the name of each living Python thread.
        children: the direct child processes, those that have ended but were not waited for included.
        descriptors: by number, what each open descriptor refers to.
    """

    threads: dict[int, str]
    children: frozenset[int]
    descriptors: dict[int, str]

    @staticmethod
    def take() -> Inventory:
        descriptors = {}
        for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208  the listing's own descriptor must not be in it
            try:
                descriptors[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")  # noqa: PTH115  as above
            except OSError:
                pass  # that of the listing
        threads = {thread.ident or 0: thread.name for thread in threading.enumerate()}
        return Inventory(threads, frozenset(direct_children()), descriptors)

    def new(self, since: Inventory) -> list[str]:
        """What is here and was not in ``since``, in words."""
        threads = self.threads.items() - since.threads.items()
        children = self.children - since.children
        descriptors = self.descriptors.items() - since.descriptors.items()
        return [
            *(f"thread {name!r}" for _, name in sorted(threads)),
            *(f"child process {pid}: {_described(pid)}" for pid in sorted(children)),
            *(f"descriptor {fd}: {target}" for fd, target in sorted(descriptors) if not HARMLESS.match(target)),
        ]

    def without(self, children: Set[int], descriptors: Set[int]) -> Inventory:
        """The same less what is known to belong elsewhere."""
        return Inventory(
            self.threads,
            self.children - children,
            {fd: target for fd, target in self.descriptors.items() if fd not in descriptors},
        )


def direct_children() -> list[int]:
    """The process ids of this process's children, by the thread that started each: psutil would look at every process of the
    machine.
    """
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        try:
            found += map(int, (task / "children").read_text().split())
        except FileNotFoundError:
            pass  # the thread has ended, and its children are another's
    return found


def _described(pid: int) -> str:
    try:
        child = psutil.Process(pid)
        return f"{child.name()} ({child.status()})"
    except psutil.NoSuchProcess:
        return "it has ended meanwhile"


def left_behind(before: Inventory, take: Callable[[], Inventory] = Inventory.take, patience: float = SOON) -> list[str]:
    """What is new since ``before``, in words; endings get ``patience`` seconds, for they take a moment."""
    deadline = time.monotonic() + patience
    while (new := take().new(before)) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    return new
