"""Starts processes so that none is left behind, even if a signal arrives at any moment.

A signal handler may raise at any instruction of the main thread, such as between the start of a process and the assignment that
names it. So no handler runs between the start of a process and the moment when its owner has recorded it:

- A process that ends by itself, such as a discovery script, starts, is read and ends inside :func:`run`. A signal that asks
  this process to end ends the other process at once, and is handled afterwards.
- A process that stays, such as a rank or an ssh, is started by a function that :func:`owned` calls, and that gives the process
  to the code that will end it.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from horovod._base.signal_deferral import with_signals_noticed
from horovod.control.fd_limit import limit_of_programs
from horovod.control.wakeup import WakeUp

_T = TypeVar("_T")

MOST_BYTES = 1 << 20
_TAIL_BYTES = 1 << 16
_EXIT_SECONDS = 1.0
"""How long a killed process may take to end. A process that waits inside the kernel may take longer; nothing waits for it."""
_LONGEST_LOOK_SECONDS = 0.05
LONGEST_WAIT_SECONDS = 0.2
"""How long the main thread waits at a time. The kernel may deliver a signal to another thread, which does not wake the main
thread."""
_ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM})
"""Signals by which users, batch systems and timeouts interrupt a process."""


class Done(NamedTuple):
    """How a process ended.

    Attributes:
        status: its exit status, or a signal's number less than 0.
        output: what it wrote to its standard output.
        errors: the last 64 KiB of what it wrote to its standard error.
    """

    status: int
    output: bytes
    errors: bytes


class Cancelled(Exception):
    """The process was ended, because this one is asked to end."""


class TooMuchOutput(Exception):
    """The process was ended, because it wrote more than ``MOST_BYTES`` bytes."""


def run(
    command: Sequence[str], seconds: float, *, environment: Mapping[str, str] | None = None, cancel: int = -1
) -> Done:
    """Run a program to its end, in a new session. All processes that it has started there are ended with it.

    Args:
        command: the program and its arguments.
        seconds: how long the program may take.
        environment: the program's environment; None for that of this process.
        cancel: a descriptor; once it is readable, the program is ended. -1 for none.

    Raises:
        TimeoutError: the program takes longer than ``seconds``.
        Cancelled: ``cancel`` is readable, or a signal came whose handler does not raise.
        TooMuchOutput: its output is too long.
        OSError: it cannot be run.
    """
    return interruptible(lambda interrupted: _run(command, seconds, environment, {cancel, interrupted} - {-1}))


def interruptible(work: Callable[[int], _T]) -> _T:
    """Call ``work(interrupted)``; signal handlers run only after its end.

    Args:
        work: must end soon once the descriptor ``interrupted`` is readable: a signal asks this process to end. In threads other
            than the main one, where no handlers run, it never becomes readable. The main thread must not wait for longer than
            ``LONGEST_WAIT_SECONDS`` at a time.
    """
    came: list[int] = []
    wake_ups: list[WakeUp] = []

    def noticed(number: int) -> None:
        if number in _ENDING:
            came.append(number)
            for each in wake_ups:
                each.set()

    def waiting() -> _T:
        wake_ups.append(WakeUp())
        if came:
            wake_ups[0].set()
        try:
            return work(wake_ups[0].fileno())
        finally:
            wake_ups.pop().close()

    return with_signals_noticed(noticed, waiting)


def owned(work: Callable[..., _T], *arguments: Any) -> _T:
    """Call ``work(*arguments)``, which starts a process and gives it to its owner. Signal handlers run right after it."""
    return with_signals_noticed(lambda _: None, work, *arguments)


class Cleanup(ExitStack[None]):
    """An ``ExitStack`` whose exit no signal handler interrupts halfway. Everything in it ends soon, and hides no exception.

    Enter it twice: ``with Cleanup() as cleanup, cleanup:``. If a handler raises right at the beginning of the first exit, the
    second exit does everything; otherwise it finds nothing to do.
    """

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        owned(super().__exit__, kind, error, traceback)

    def own(self, make: Callable[[], Any]) -> Any:
        """Enter the context that ``make`` makes, and return what that gives."""
        return owned(lambda: self.enter_context(make()))


def _run(
    command: Sequence[str], seconds: float, environment: Mapping[str, str] | None, cancels: Collection[int]
) -> Done:
    deadline = time.monotonic() + seconds
    process = subprocess.Popen(
        command,
        env=None if environment is None else dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # so that all that it starts can be ended with it
        bufsize=0,
        preexec_fn=limit_of_programs(),
    )
    assert process.stdout is not None and process.stderr is not None
    with process.stdout, process.stderr:
        try:
            output, errors = _read(process, deadline, cancels)
        finally:
            with suppress(OSError):  # all of it has ended
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_EXIT_SECONDS)
    return Done(process.returncode, output, errors)


def _read(process: subprocess.Popen[bytes], deadline: float, cancels: Collection[int]) -> tuple[bytes, bytes]:
    """Read both streams until they and the process have ended. Does not reap the process, so its id is not reused."""
    assert process.stdout is not None and process.stderr is not None
    out, errors = process.stdout.fileno(), process.stderr.fileno()
    found = {out: b"", errors: b""}
    reading = set(found)
    look = 0.001  # the process may close its streams and continue
    with selectors.DefaultSelector() as selector:
        for stream in (*found, *cancels):
            selector.register(stream, selectors.EVENT_READ)
        while reading or not _has_ended(process):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            for key, _ in selector.select(min(remaining, LONGEST_WAIT_SECONDS if reading else look)):
                if key.fd in cancels:
                    raise Cancelled
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fd)
                    reading.discard(key.fd)
                found[key.fd] += data
            if not reading:
                look = min(2 * look, _LONGEST_LOOK_SECONDS)
            found[errors] = found[errors][-_TAIL_BYTES:]
            if len(found[out]) > MOST_BYTES:
                raise TooMuchOutput
    return found[out], found[errors]


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True  # other code of this process has reaped it
