"""Writes the ranks' output, line by line and labelled, to the launcher's own streams and, if requested, to files.

The launcher's one thread writes everything, in whole lines, so lines of different ranks never mix.
"""

from __future__ import annotations

import os
import select
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from horovod.runner.errors import UsageError
from horovod.runner.output.lines import LineSplitter
from horovod.runner.output.tracebacks import ShownTracebacks, TracebackFilter
from horovod.runner.signals import SignalPipe

TAIL_LINES = 20
TAIL_LINE_CHARACTERS = 4096
_FINAL_OUTPUT_SECONDS = 0.5
"""How long to wait for a reader when the launcher has been asked to end."""
ERASE_LINE = "\x1b[K"


class ReaderGone(Exception):
    """The reader of the launcher's output has closed it, as ``head`` does."""


@dataclass
class Cursor:
    """The position of the cursor. ``bar`` and ``line`` are labels of streams, or ""."""

    bar: str = ""
    """The cursor is on the progress bar of this stream, which wrote a line ending in ``\\r``."""
    line: str = ""
    """The cursor is after an incomplete line of this stream, such as a prompt."""
    broken: set[str] = field(default_factory=set)
    """Streams with an incomplete line after which others have written."""


class Sink(ABC):
    """One destination of output. ``cursor`` is shared by sinks that end in the same terminal."""

    def __init__(self, cursor: Cursor | None = None) -> None:
        self._terminal = cursor is not None
        self._cursor = cursor or Cursor()

    def show(self, label: str, lines: Sequence[str], stamp: str = "") -> None:
        """Write lines, each behind its label. The last may lack its end; what the stream writes next completes it."""
        pieces: list[str] = []
        for line in lines:
            if line == "\n" and label in self._cursor.broken:
                self._cursor.broken.discard(label)  # this line already ended when another stream wrote
                continue
            if label and (self._cursor.line == label or (line == "\n" and self._cursor.bar == label)):
                pieces.append(line)  # it continues, or ends, the text at the cursor
            else:
                if self._cursor.line:
                    self._cursor.broken.add(self._cursor.line)
                    pieces.append("\n")
                self._cursor.broken.discard(label)
                if self._cursor.bar and self._terminal:
                    pieces.append(ERASE_LINE)
                pieces += (stamp, label, line)
            self._cursor.bar = label if line.endswith("\r") else ""
            self._cursor.line = "" if line.endswith(("\r", "\n")) else label
        self.write("".join(pieces))

    @abstractmethod
    def write(self, text: str) -> None:
        """Write all of ``text`` now."""


class DescriptorSink(Sink):
    """A file descriptor of this process. It may be in non-blocking mode: others share it and may have set that.

    The launcher waits for a reader that does not read, such as a pager that waits for a key. After a signal has asked the
    launcher to end, it waits only a moment, and output that is not read by then is lost.

    Args:
        signals: where signals to the launcher arrive.
    """

    def __init__(self, descriptor: int, cursor: Cursor | None = None, signals: SignalPipe | None = None) -> None:
        super().__init__(cursor)
        self._descriptor = descriptor
        self._signals = signals
        self._given_up = False

    def write(self, text: str) -> None:
        data = text.encode("utf-8", "replace")
        start = 0
        while start < len(data) and self._has_reader():
            # A pipe that is not full takes this much at once, and does not mix it with what other processes write.
            stop = min(len(data), start + select.PIPE_BUF)
            if stop < len(data):
                stop = data.rfind(b"\n", start, stop) + 1 or stop
            try:
                start += os.write(self._descriptor, memoryview(data)[start:stop])
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise ReaderGone from None
            except OSError:
                return  # a full disk or a terminal that is gone costs the output, not the job

    def _has_reader(self) -> bool:
        """Wait until the descriptor can be written; False if no reader takes data and the launcher must end."""
        while True:
            ending = self._signals is not None and self._signals.pressed
            poll = select.poll()
            poll.register(self._descriptor, select.POLLOUT)
            if self._signals is not None and not ending:
                poll.register(self._signals, select.POLLIN)
            milliseconds = (0 if self._given_up else _FINAL_OUTPUT_SECONDS * 1000) if ending else None
            ready = [descriptor for descriptor, _ in poll.poll(milliseconds)]
            if self._descriptor in ready:
                return True
            if ending:
                self._given_up = True
                return False


class StreamSink(Sink):
    """A text stream object, such as a notebook's ``sys.stdout``, which need not have a descriptor; None for nowhere."""

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__()
        self._stream = stream

    def write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                encoding = self._stream.encoding or "ascii"
                self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self._stream.flush()
        except BrokenPipeError:
            raise ReaderGone from None
        except (ValueError, OSError):
            pass  # closed by its owner, or its disk is full: that costs the output, not the job


class FileSink(Sink):
    """The file of one stream. A full disk ends the file, not the job."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        super().__init__()
        self._path = path
        self._say = say
        self._file = path.open("wb", buffering=0)

    def write(self, text: str) -> None:
        if self._file.closed:
            return
        data = memoryview(text.encode("utf-8", "replace"))
        try:
            while data:
                data = data[self._file.write(data) or 0 :]
        except OSError as error:
            self._file.close()
            self._say(
                f"horovodrun: cannot write {self._path}: {error.strerror}; the file is incomplete, the job continues"
            )

    def close(self) -> None:
        self._file.close()


class RankStream:
    """One stream of one rank on its way to its sinks.

    Args:
        label: what each line begins with.
        sinks: shared with other streams.
        own_sinks: get every line.
        tracebacks: what the shared sinks are not to repeat; None for nothing.
    """

    def __init__(
        self,
        label: str,
        sinks: Sequence[Sink],
        *,
        timestamps: bool,
        own_sinks: Sequence[FileSink] = (),
        tracebacks: TracebackFilter | None = None,
    ) -> None:
        self._label = label
        self._sinks = sinks
        self._own_sinks = own_sinks
        self._tracebacks = tracebacks
        self._timestamps = timestamps
        self._splitter = LineSplitter()
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        """The last lines, or their beginnings, without what a progress bar overwrote."""
        self._begun = ""  # the part of an incomplete line that has been shown

    def feed(self, data: bytes) -> None:
        self._show(self._splitter.feed(data))

    @property
    def incomplete(self) -> bool:
        """Whether a part of a line waits for the rest."""
        return self._splitter.incomplete

    def show_incomplete(self) -> None:
        """Show the part of a line that has arrived, such as a prompt."""
        self._show([self._splitter.take_incomplete()])

    @property
    def holds(self) -> bool:
        """Whether a traceback waits for its end, and for :meth:`release`."""
        return self._tracebacks is not None and self._tracebacks.holds

    def release(self) -> None:
        """Show what waits."""
        if self._tracebacks is not None:
            self._write(self._sinks, self._tracebacks.release(time.monotonic()))

    def finish(self) -> None:
        """The rank has closed the stream."""
        try:
            self._show(self._splitter.finish())
            self.release()
        finally:
            for sink in self._own_sinks:
                sink.close()

    def _show(self, lines: list[str]) -> None:
        if not lines:
            return
        for line in lines:
            begun = self._begun + line[:TAIL_LINE_CHARACTERS]
            if line.endswith("\n"):
                self.tail.append(begun.removesuffix("\n")[:TAIL_LINE_CHARACTERS])
            self._begun = "" if line.endswith(("\r", "\n")) else begun[:TAIL_LINE_CHARACTERS]
        self._write(self._own_sinks, lines)
        if self._tracebacks is not None:
            lines = self._tracebacks.feed(lines, time.monotonic())
        self._write(self._sinks, lines)

    def _write(self, sinks: Sequence[Sink], lines: Sequence[str]) -> None:
        stamp = time.asctime() if self._timestamps else ""
        for sink in sinks if lines else ():
            sink.show(self._label, lines, stamp)


class JobOutput:
    """All output of one job: makes the streams of its ranks and shows the launcher's own messages.

    Args:
        stdout, stderr: where the ranks' streams go; the launcher's own messages go to ``stderr``.
        size: how many ranks there are.
        folder: where to keep each rank's output as well, or None.
        timestamps: whether to put the time before each line.
    """

    def __init__(
        self, stdout: Sink, stderr: Sink, size: int, folder: str | None = None, *, timestamps: bool = False
    ) -> None:
        self._console = {"stdout": stdout, "stderr": stderr}
        self._size = size
        self._folder = None if folder is None else Path(folder)
        self._timestamps = timestamps
        self._shown = ShownTracebacks()
        if self._folder is not None:
            try:
                self._keep_earlier(self._folder)
                for rank in range(size):
                    self._rank_folder(self._folder, rank).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"cannot write output to {folder}: {error.strerror} ({error.filename})") from None

    def stream(self, rank: int, name: str) -> RankStream:
        """The stream ``name`` (stdout or stderr) of a rank."""
        files: list[FileSink] = []
        if self._folder is not None:
            path = self._rank_folder(self._folder, rank) / name
            try:
                path.parent.mkdir(parents=True, exist_ok=True)  # elastic jobs have more processes than ranks
                files.append(FileSink(path, self.say))
            except OSError as error:
                raise UsageError(f"cannot write {path}: {error.strerror}") from None
        return RankStream(
            f"[{rank}]<{name}>:",
            [self._console[name]],
            timestamps=self._timestamps,
            own_sinks=files,
            tracebacks=TracebackFilter(f"[{rank}]", self._shown) if name == "stderr" else None,
        )

    def say(self, text: str) -> None:
        """Show a message of the launcher."""
        try:
            self._console["stderr"].show("", [line + "\n" for line in text.splitlines()])
        except (ReaderGone, OSError):
            pass  # stderr is closed

    def _keep_earlier(self, folder: Path) -> None:
        """Rename the files of an earlier job there: ``stdout`` becomes ``stdout.1``, or gets the next number that is free."""
        files = [path for name in ("stdout", "stderr") for path in folder.glob(f"rank.*/{name}") if path.is_file()]
        if not files:
            return
        kept = [path.suffix[1:] for name in ("stdout", "stderr") for path in folder.glob(f"rank.*/{name}.*")]
        number = 1 + max((int(suffix) for suffix in kept if suffix.isdecimal()), default=0)
        for path in files:
            path.rename(path.with_name(f"{path.name}.{number}"))
        self.say(f"horovodrun: the output of an earlier job in {folder} is kept as stdout.{number} and stderr.{number}")

    def _rank_folder(self, folder: Path, rank: int) -> Path:
        width = len(str(self._size - 1))
        return folder / f"rank.{rank:0{width}d}"


def console(signals: SignalPipe) -> tuple[Sink, Sink]:
    """Sinks for this process's own standard output and error."""
    cursor = Cursor()
    stdout, stderr = (DescriptorSink(fd, cursor if os.isatty(fd) else None, signals) for fd in (1, 2))
    return stdout, stderr
