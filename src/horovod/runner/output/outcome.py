"""How a job ended, and the text that says so."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from horovod.runner.agent.messages import Exit

UNHEARD_SECONDS = 20.0
"""The time within which an agent that has lost the launcher, or its guardian, has ended all of its processes."""
_MOST_LOST = 16
"""How many lost ranks the final message names."""
_WELL = Exit(0)
_KIND = re.compile(r"[\w.]+(?=: )")
"""The class of an exception, at the beginning of its text."""
_NOTHING_TO_READ = ("bdb.BdbQuit", "EOFError: EOF when reading a line")
"""The last line of a Python program whose debugger or ``input()`` found standard input empty."""


@dataclass(frozen=True)
class ReportedFailure:
    """A failure that the runtime of a rank has reported, of itself or of another rank."""

    rank: int
    reason: str
    own: bool = False
    """Whether the rank itself has said so, such as one whose script has raised."""

    @classmethod
    def decoded(cls, value: bytes) -> ReportedFailure | None:
        """The failure that a rank has put at the rendezvous server; None if no runtime of this version has written it."""
        try:
            content = json.loads(value)
            return cls(int(content["rank"]), str(content["reason"]), bool(content.get("own")))
        except (ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    exits: Mapping[int, Exit] = field(default_factory=dict)
    """How each rank's process ended."""
    culprit: int | None = None
    """The rank that failed first; None if none did."""
    exit: Exit = _WELL
    """How the culprit ended. If it did not end by itself: how the first rank ended that failed because of it."""
    victim: int | None = None
    """The rank whose exit is ``exit``, if the culprit did not end by itself."""
    location: str = ""
    """The host and process of the culprit."""
    reason: str = ""
    """The runtime's reason for the failure."""
    tail: Sequence[str] = ()
    """The last lines of the culprit's stderr."""
    reader: int | None = None
    """The rank that read standard input, or None."""
    interrupted: int = 0
    """The signal that asked the launcher to end, or 0."""
    immortal: frozenset[int] = frozenset()
    """Process ids of the job that SIGKILL did not end."""
    called: str = "rank"
    """What ``exits`` and ``culprit`` number: ranks, or in an elastic job processes, whose ranks change."""
    stopped: str = ""
    """Why an elastic job could not continue; "" if it was not stopped."""
    unheard: Sequence[str] = ()
    """Hosts that did not confirm, at the end, that nothing of the job is left there."""

    survived: Sequence[str] = ()
    """The ranks that an elastic job has lost, and has gone on without."""

    @property
    def failed(self) -> bool:
        return self.culprit is not None or bool(self.interrupted) or bool(self.stopped)

    @property
    def status(self) -> int:
        """The launcher's own exit status."""
        return 128 + self.interrupted if self.interrupted else self.exit.code or int(bool(self.stopped))

    def describe(self, *, below_output: bool = False) -> str:
        """The final message about a job that failed, was interrupted or has lost ranks; "" for one that went well.

        Args:
            below_output: it is shown below the output of the ranks, so it does not repeat a reason that a traceback ended with.
        """
        lines: list[str] = []
        if self.survived:
            more = f"; and {len(self.survived) - _MOST_LOST} more" if len(self.survived) > _MOST_LOST else ""
            lines.append(f"horovodrun: the job has gone on without: {'; '.join(self.survived[:_MOST_LOST])}{more}")
        if self.immortal:
            numbers = ", ".join(map(str, sorted(self.immortal)))
            lines.append(
                f"horovodrun: processes {numbers} did not end even after SIGKILL; they wait inside the kernel, "
                "often for a network file system or a device"
            )
        if self.unheard:
            lines.append(
                f"horovodrun: {', '.join(self.unheard)} did not confirm that the job has ended there; the agent there ends "
                f"the remaining processes by itself, within {UNHEARD_SECONDS:g} seconds"
            )
        if self.interrupted:
            lines.append(f"horovodrun: ended by {signal.Signals(self.interrupted).name}")
        elif self.stopped and self.culprit is None:
            lines.append(f"horovodrun: the job ended: {self.stopped}.")
        elif self.culprit is not None:
            reason = self.exit.reason or self.reason  # first, because other ranks only saw its connections close
            printed = _has_printed(self.tail, reason)
            if self.tail and not printed:
                lines.append(f"horovodrun: the end of {self.called} {self.culprit}'s stderr:")
                lines += ["    " + line for line in self.tail]
            if self.stopped:
                lines.append(f"horovodrun: the job ended: {self.stopped}.")
            lines.append(
                f"horovodrun: the job failed. {self.called.capitalize()} {self.culprit} failed first ({self.location})."
            )
            if reason:
                kind = _KIND.match(reason) if printed and below_output else None
                lines.append(f"Reason: {f'{kind[0]}, as printed above' if kind else reason}")
            lines.append(f"Process name: {self.culprit}")
            whose = "" if self.victim is None else f", which is that of rank {self.victim}: it failed because of this"
            lines.append(f"Exit code: {self.exit.code if self.exit.reason else self.exit}{whose}")
            if self.tail and self.tail[-1].startswith(_NOTHING_TO_READ) and self.culprit != self.reader:
                lines.append(
                    f"Rank {self.culprit} does not read standard input. To debug or answer it, start the job with "
                    f"horovodrun --stdin {self.culprit}"
                )
            if self.exit.signal == signal.SIGKILL:
                lines.append(
                    "Neither Horovod nor its launcher sends SIGKILL to a running rank: did the machine run out of memory?"
                )
        return "\n".join(lines)


def _has_printed(tail: Sequence[str], reason: str) -> bool:
    """Whether the end of a rank's stderr has the reason, as the traceback of a collective's error does."""
    return bool(reason) and any(reason.splitlines()[-1].strip() in line for line in tail)
