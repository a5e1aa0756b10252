"""Splits a stream of bytes into whole lines of text. Pure; one splitter per stream."""

from __future__ import annotations

import codecs
import re

# The end of a line. A pattern that included the line would scan a long one repeatedly.
_END = re.compile(r"\r\n|\n|\r")


class LineSplitter:
    """Takes bytes as they arrive, and returns the lines that they complete, each with its end: ``\\n`` or ``\\r``.

    A carriage return ends a line too, so that a progress bar shows while it moves; ``\\r\\n`` counts as ``\\n``. Bytes that
    are not UTF-8 become U+FFFD. A line longer than ``bound`` characters is cut, so that memory stays bounded and one rank's
    endless line does not keep the others from being seen.
    """

    def __init__(self, bound: int = 1 << 24) -> None:
        self._bound = bound
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._parts: list[str] = []
        self._length = 0
        self._shown = False  # whether a part of the line that is not complete has been returned already

    def feed(self, data: bytes) -> list[str]:
        """The lines that ``data`` completes."""
        return self._split(self._decoder.decode(data))

    def finish(self) -> list[str]:
        """The stream has ended. Returns what is left, as a line of its own."""
        lines = self._split(self._decoder.decode(b"", final=True))
        if self._parts or self._shown:
            lines.append(self._take() + "\n")
        return lines

    @property
    def incomplete(self) -> bool:
        """Whether a part of a line has arrived that has not been returned."""
        return bool(self._parts)

    def take_incomplete(self) -> str:
        """The part of a line that has arrived so far. The rest of that line is returned next."""
        text = self._take()
        self._shown = self._shown or bool(text)
        return text

    def _split(self, text: str) -> list[str]:
        lines: list[str] = []
        position = 0
        for match in _END.finditer(text):
            content, end = text[position : match.start()], match.group()
            position = match.end()
            if self._parts:
                self._parts.append(content)
                content = self._take()
            if end == "\r" and not content and not self._shown:
                continue  # a progress bar begins with a carriage return; there is nothing to show yet
            self._shown = False
            whole = (len(content) - 1) // self._bound * self._bound if content else 0
            lines.extend(self._cut(content[:whole]))
            lines.append(content[whole:] + ("\r" if end == "\r" else "\n"))
        if position < len(text):
            self._parts.append(text[position:])
            self._length += len(text) - position
            if self._length > self._bound:
                text = self._take()
                whole = len(text) // self._bound * self._bound
                lines.extend(self._cut(text[:whole]))
                self._parts, self._length = [text[whole:]], len(text) - whole
        return lines

    def _cut(self, text: str) -> list[str]:
        return [text[start : start + self._bound] + "\n" for start in range(0, len(text), self._bound)]

    def _take(self) -> str:
        text = "".join(self._parts)
        self._parts, self._length = [], 0
        return text
