"""Finds and ends every process of a job, also those that left the session of the rank that started them.

A process belongs to a job if it is in the session of one of the ranks, or was started with the job's mark in its environment,
or descends from a process that belongs to the job. So DataLoader workers, shell pipelines and children that created a session
for themselves are all found. Only the standard library is used: the guardian imports this in a bare interpreter.
"""

# pathlib would double the time that the guardian's bare interpreter takes to start:
# ruff: noqa: PTH112, PTH123, PTH208

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Collection

from horovod.runner.agent.grace_period import GRACE_SECONDS

_AFTER_KILL_SECONDS = 1.0


def members(sessions: Collection[int], mark: bytes = b"") -> set[int]:
    """Process ids of a job: those in ``sessions``, those started with ``mark`` in their environment, their descendants.

    Without a mark only the sessions count. Zombies and the caller itself are left out.
    """
    parents: dict[int, int] = {}
    found: set[int] = set()
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:
                state, parent, _, session = stat.read().rpartition(b")")[2].split()[:4]
            if state in b"ZX":
                continue
            parents[int(name)] = int(parent)
            if int(session) in sessions:
                found.add(int(name))
            elif mark:
                with open(f"/proc/{name}/environ", "rb") as environ:
                    if mark in environ.read():
                        found.add(int(name))
        except (OSError, ValueError):
            continue  # it has ended, or belongs to another user
    if mark:
        found |= _descendants(found, parents)
    return found - {os.getpid()}


def _descendants(ancestors: set[int], parents: dict[int, int]) -> set[int]:
    children: dict[int, list[int]] = {}
    for child, parent in parents.items():
        children.setdefault(parent, []).append(child)
    found: set[int] = set()
    open_ends = list(ancestors)
    while open_ends:
        for child in children.get(open_ends.pop(), ()):
            if child not in found:
                found.add(child)
                open_ends.append(child)
    return found


def send(pids: Collection[int], number: int) -> None:
    """Send a signal to each process that still exists and belongs to this user."""
    for pid in pids:
        try:
            os.kill(pid, number)
            if number == signal.SIGTERM:
                os.kill(pid, signal.SIGCONT)  # a stopped process could not act on the first signal
        except OSError:
            pass


def end(find: Callable[[], set[int]], grace: float = GRACE_SECONDS) -> set[int]:
    """Send SIGTERM to the processes that ``find`` returns, and SIGKILL to those left after ``grace`` seconds.

    Calls ``find`` again until it returns nothing, because a process may start others while it ends.

    Returns:
        Processes that did not end in time after SIGKILL, because they wait inside the kernel.
    """
    asked: set[int] = set()
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline:
        left = find()
        if not left:
            return left
        send(left - asked, signal.SIGTERM)
        asked |= left
        _await_an_end(left, deadline)
    deadline = time.monotonic() + _AFTER_KILL_SECONDS
    while True:
        left = find()
        if not left or time.monotonic() >= deadline:
            return left
        send(left, signal.SIGKILL)
        _await_an_end(left, deadline)


def _await_an_end(pids: Collection[int], deadline: float) -> None:
    """Return when one of the processes has ended, or at ``deadline``; if the kernel cannot tell, after a short sleep."""
    poll = select.poll()
    descriptors: list[int] = []
    try:
        for pid in pids:
            descriptors.append(os.pidfd_open(pid))
            poll.register(descriptors[-1], select.POLLIN)
        poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
    except ProcessLookupError:
        pass  # one has just ended
    except (AttributeError, OSError):
        time.sleep(0.02)  # this kernel, or sandbox, has no descriptors of processes to wait for
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
