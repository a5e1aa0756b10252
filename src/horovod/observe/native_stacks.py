"""The stack of a process that cannot run Python code because native code keeps the interpreter lock.

On every rank, :mod:`faulthandler` writes the stack of the main thread into an unnamed file when SIGURG arrives. The kernel
ignores that signal in processes that do not handle it. The handler is native code, so it works in any state of the interpreter.
The rank itself is woken by the file's change (:meth:`NativeStacks.fileno`). Another process of the same user on the same host
reads the file if the rank cannot (:func:`stack_of`).
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import tempfile
import time
from pathlib import Path

SIGNAL = signal.SIGURG
_PREFIX = "horovod-stacks-"
_MODIFIED = 2  # IN_MODIFY of inotify
_MOST_BYTES = 1 << 20


class NativeStacks:
    """The signal handler, its file, and the notification of the file's change. One per process.

    Raises:
        OSError: no temporary file can be made, or the kernel has no inotify.
    """

    def __init__(self) -> None:
        self._file, path = tempfile.mkstemp(prefix=_PREFIX)
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            self._changes = int(libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))
            if self._changes < 0:
                raise OSError(ctypes.get_errno(), "inotify is not available")
            if libc.inotify_add_watch(self._changes, os.fsencode(path), _MODIFIED) < 0:
                os.close(self._changes)
                raise OSError(ctypes.get_errno(), "inotify is not available")
        except BaseException:
            os.close(self._file)
            raise
        finally:
            Path(path).unlink()
        # A handler of the user's stays.
        self._registered = signal.getsignal(SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN)
        if self._registered:
            # Of the thread that gets the signal only, which is the main thread: it stands still meanwhile. The others would run
            # on while their frames are read, which crashes.
            faulthandler.register(SIGNAL, self._file, all_threads=False, chain=False)

    def fileno(self) -> int:
        """Readable when the signal has come."""
        return self._changes

    def take(self) -> None:
        """Discard what the handler has written."""
        try:
            while os.read(self._changes, 4096):
                pass
        except BlockingIOError:
            pass
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)

    def close(self) -> None:
        if self._registered:
            faulthandler.unregister(SIGNAL)
        os.close(self._changes)
        os.close(self._file)

    def abandon(self) -> None:
        """In a forked child: the handler would write into the parent's file."""
        if self._registered:
            faulthandler.unregister(SIGNAL)

    def descriptors(self) -> list[int]:
        """The descriptors that a forked child must close."""
        return [self._changes, self._file]


def stack_of(pid: int, seconds: float) -> str:
    """Signal another process of this host and user, and read the stack that its main thread has written; "" if there is none.

    The process must be a rank. It may remove the text itself before this process reads it.
    """
    file = _file_of(pid)
    if file is None:
        return ""
    text = ""
    try:
        before = _content(file)
        os.kill(pid, SIGNAL)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(0.05)
            now = _content(file)
            if now and now == text:
                break  # complete: nothing came since the last look
            text = now if now != before else text
    except OSError:
        pass  # it has ended
    return text


def _file_of(pid: int) -> Path | None:
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            if entry.readlink().name.startswith(_PREFIX):
                return entry
    except OSError:
        pass
    return None


def _content(file: Path) -> str:
    with file.open("rb") as stream:
        return stream.read(_MOST_BYTES).decode(errors="replace")
