"""Reports tensors that some ranks have submitted and others have not. Pure; the coordinator calls it from time to time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

SHOWN = 6


class Stalled(NamedTuple):
    """One incomplete name: its request as text, since when, and which global ranks have and have not submitted it."""

    name: str
    view: str
    since: float
    announced: list[int]
    missing: list[int]


def describe_different_names(waiting: Sequence[tuple[Sequence[int], str, str]]) -> str:
    """The message if ranks wait for different names.

    Args:
        waiting: for each name, the ranks that have submitted it, the name, and a description of its request; oldest first.
    """
    lines = ["The ranks wait for different collectives, so none of these can complete:"]
    for ranks, name, view in waiting[:SHOWN]:
        lines.append(f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {name}, submitted as {view}")
    if len(waiting) > SHOWN:
        lines.append(f"... and {len(waiting) - SHOWN} more")
    lines.append(
        "They are called in another order, under other names, or by ranks that take different paths through the script."
    )
    return "\n".join(lines)


class StallInspector:
    """Decides when to report, and writes the report.

    Args:
        warning_seconds: the age at which a name is reported; it is reported again after the same time.
        shutdown_seconds: the age at which the job is ended; 0: never.
    """

    def __init__(self, warning_seconds: float, shutdown_seconds: float) -> None:
        self._warning = warning_seconds
        self._shutdown = shutdown_seconds
        self._next_report = 0.0

    def report(
        self,
        stalled: Sequence[Stalled],
        now: float,
        call_sites: Mapping[int, str],
        thread_lines: Mapping[int, Sequence[str]] = MappingProxyType({}),
    ) -> tuple[str, int]:
        """The text to log now, and the rank to blame if the job is to be ended.

        Args:
            stalled: all incomplete names, oldest first.
            call_sites: by rank, the line of the script that its main thread is at, if known.
            thread_lines: by rank, the lines that its other threads are at.

        Returns:
            The text, "" if there is none; and the global rank to blame, -1 while the job goes on.
        """
        late = [item for item in stalled if now - item.since >= self._warning and item.missing]
        if not late:
            self._next_report = 0.0
            return "", -1
        end = [item for item in late if self._shutdown and now - item.since >= self._shutdown]
        if now < self._next_report and not end:
            return "", -1
        self._next_report = now + self._warning
        lines = [
            "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are "
            f"waiting for remainder of ranks for more than {int(now - late[0].since)} seconds. "
            "Either these ranks are slower, or they take another path through the script and will never submit them.",
            "Missing ranks:",
        ]
        guilty = {rank for item in end for rank in item.missing}
        missing: dict[int, list[str]] = {}
        for item in late:
            for rank in item.missing:
                missing.setdefault(rank, []).append(item.name)
        for rank, names in sorted(missing.items()):
            shown = ", ".join(names[:SHOWN]) + (" ..." if len(names) > SHOWN else "")
            location = f" (it is at {call_sites[rank]})" if rank in call_sites else ""
            lines.append(f"{rank}{'!' if rank in guilty else ''}: [{shown}]{location}")
            lines += [f"    its thread {line}" for line in thread_lines.get(rank, ())]
        lines += [f"{item.name} was submitted as: {item.view}" for item in late[:SHOWN]]
        if end:
            lines.append(
                f'One or more rank (marked by "!") is stalled for longer than {self._shutdown:g} seconds. Will shutdown.'
            )
        return "\n".join(lines), min(guilty, default=-1)
