"""Ends the job if the launcher dies, even by SIGKILL.

The guardian is one small process per job, in a session of its own. It reads a pipe from the launcher. The launcher writes the
mark of the job's processes, each rank that starts or ends, and finally "done". If the pipe closes without "done", the launcher
is dead, and the guardian ends every process of the job. This file is the launcher's side; ``guardian_process`` is the other.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from horovod.control.fd_limit import limit_of_programs
from horovod.runner.errors import LaunchError, UsageError

_EXIT_SECONDS = 5.0
"""The time that the guardian may take to end after the end of the job."""
_START = "import sys; sys.path.append({path!r}); from horovod.runner.agent.guardian_process import watch; watch()"


class Guardian:
    """The launcher's end of the pipe.

    Args:
        mark: bytes that every process of the job has in its environment.
        environment: for the guardian itself; it must not hold the mark.
    """

    def __init__(self, mark: bytes, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _START.format(path=str(Path(__file__).resolve().parents[3]))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            env=dict(environment),
            bufsize=0,
            preexec_fn=limit_of_programs(),
        )
        self._write(b"mark " + mark)

    def watch_over(self, session: int) -> None:
        """Tell the guardian that a rank has started; its process id is also its session's."""
        self._write(b"+%d" % session)

    def forget(self, session: int) -> None:
        """Tell the guardian that a rank has been reaped, so the kernel may reuse its number."""
        self._write(b"-%d" % session)

    def __enter__(self) -> Guardian:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the guardian. After an exception, such as of Ctrl-C, do not write "done", so that it ends the rest of the job.

        Any exception counts: a signal handler of the script may raise anything at any point of the job's end.
        """
        orderly = kind is None or issubclass(kind, (LaunchError, UsageError))
        if orderly:
            self._write(b"done")
        if self._process.stdin is not None:
            self._process.stdin.close()
        if orderly:
            try:
                self._process.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:  # the guardian is stopped, and has nothing left to do
                self._process.kill()
                self._process.wait()

    def _write(self, line: bytes) -> None:
        try:
            if self._process.stdin is not None:
                self._process.stdin.write(line + b"\n")
        except OSError:
            pass  # the guardian was killed; the job continues without it
