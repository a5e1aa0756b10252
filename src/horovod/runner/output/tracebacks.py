"""Shows a traceback that several ranks print once: an error of a collective ends all of them with the same text.

A traceback waits until it is complete, :data:`HOLD_SECONDS` at most. If another rank has printed one with the same text just
before, one line refers to that. The lines of the stack are shown again if they differ. No clock of its own: the caller gives
the time.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile

HOLD_SECONDS = 0.5
"""How long the lines that follow the beginning of a traceback wait for the end of the rank's output."""
_FRESH_SECONDS = 10.0
"""A line refers only to what was shown this short time before."""
_MOST_LINES = 500
_MOST_TRACEBACKS = 64
_BEGIN = re.compile(r"(\[rank\d+\]: )?Traceback \(most recent call last\):\n")
"""torch.distributed puts its rank before each line."""


@dataclass
class _Shown:
    """An error that has been shown."""

    label: str
    when: float
    text: Sequence[str]
    """The lines from the error's type on."""
    stacks: list[Sequence[str]] = field(default_factory=list)
    """The stacks that have been shown with it."""


class ShownTracebacks:
    """The tracebacks that all streams of a job have shown lately."""

    def __init__(self) -> None:
        self._shown: deque[_Shown] = deque(maxlen=_MOST_TRACEBACKS)

    def fold(self, label: str, lines: Sequence[str], now: float) -> list[str]:
        """What to show of the lines of one stream, which begin with a traceback.

        Args:
            label: the label of the stream. What it has shown itself is not referred to.
            now: ``time.monotonic()``.
        """
        begins = [number for number, line in enumerate(lines) if _BEGIN.fullmatch(line)]
        folded: list[str] = []
        referred = ""
        for begin, end in pairwise([*begins, len(lines)]):
            part, refers = self._fold(label, lines[begin:end], now)
            if refers and refers == referred and lines[begin - 1] == "\n":
                folded.pop()  # the errors of a chain: one line is enough
            referred = refers
            folded += part
        return folded

    def _fold(self, label: str, lines: Sequence[str], now: float) -> tuple[list[str], str]:
        """The same for lines with one traceback; and the label that they refer to, if they do nothing else."""
        match = _BEGIN.fullmatch(lines[0])
        prefix = (match and match[1]) or ""
        plain = [line.removeprefix(prefix) for line in lines]
        length = next((number for number, line in enumerate(plain) if number and line[:1].strip()), len(plain))
        stack, text = plain[:length], plain[length:]
        if not text:
            return list(lines), ""
        shown, same = self._find(label, text, now)
        if shown is None:
            self._shown.append(_Shown(label, now, text, [stack]))
            return list(lines), ""
        kind = text[0].rstrip("\n").partition(":")[0]
        rest = list(lines[length + same :])
        if stack in shown.stacks:
            reference = f"{prefix}The same traceback as {shown.label} above: {kind}\n"
            return [reference, *rest], "" if rest else shown.label
        shown.stacks.append(stack)
        reference = f"{kind}: the same text as {shown.label} above\n"
        if len(reference) > sum(map(len, text[:same])):
            return list(lines), ""
        return [*lines[:length], prefix + reference, *rest], ""

    def _find(self, label: str, text: Sequence[str], now: float) -> tuple[_Shown | None, int]:
        """The error of another stream whose text begins most like this one, and the number of lines that are the same."""
        best: _Shown | None = None
        most = 0
        for each in self._shown:
            if each.label != label and now - each.when < _FRESH_SECONDS:
                same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(each.text, text, strict=False))))
                if same > most:
                    best, most = each, same
        return best, most


class TracebackFilter:
    """One stream on its way to the launcher's own.

    Args:
        label: what its lines begin with.
        shown: shared by all streams of a job.
    """

    def __init__(self, label: str, shown: ShownTracebacks) -> None:
        self._label = label
        self._shown = shown
        self._held: list[str] = []

    @property
    def holds(self) -> bool:
        """Whether lines wait. :meth:`release` must be called :data:`HOLD_SECONDS` after the first has begun to."""
        return bool(self._held)

    def feed(self, lines: Sequence[str], now: float) -> list[str]:
        """Take lines, each with its end. The last may lack it. Returns those to show now."""
        show: list[str] = []
        for line in lines:
            if self._held or _BEGIN.fullmatch(line):
                self._held.append(line)
                if not line.endswith("\n") or len(self._held) == _MOST_LINES:  # a prompt or a progress bar
                    show += self.release(now)
            else:
                show.append(line)
        return show

    def release(self, now: float) -> list[str]:
        """The lines that wait, to show now."""
        held, self._held = self._held, []
        return self._shown.fold(self._label, held, now)
