"""Outlives the launcher by a moment: if the launcher vanishes, even by SIGKILL, its job is ended.

One small process per job, in a session of its own, holds the reading end of a pipe from the launcher. Over it comes what
marks the job's processes, the ranks as they start and end, and at last "done". If the pipe ends without that word, the
launcher is dead, and the guardian ends every process of the job. This is the launcher's side; ``guardian_process`` is the
other.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_START = "import sys; sys.path.append({path!r}); from horovod.runner.agent.guardian_process import watch; watch()"


class Guardian:
    """The launcher's end of the pipe.

    Args:
        mark: what every process of the job has in its environment.
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
        )
        self._tell(b"mark " + mark)

    def watch_over(self, session: int) -> None:
        """A rank has started; its process id is also its session's."""
        self._tell(b"+%d" % session)

    def forget(self, session: int) -> None:
        """A rank has been reaped; its number may now belong to somebody else."""
        self._tell(b"-%d" % session)

    def __enter__(self) -> Guardian:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Dismiss the guardian. Left by Ctrl-C or the like it is not dismissed, but sees to it that nothing is left."""
        orderly = kind is None or issubclass(kind, Exception)
        if orderly:
            self._tell(b"done")
        if self._process.stdin is not None:
            self._process.stdin.close()
        if orderly:
            self._process.wait()

    def _tell(self, word: bytes) -> None:
        try:
            if self._process.stdin is not None:
                self._process.stdin.write(word + b"\n")
        except OSError:
            pass  # somebody killed the guardian: the job goes on without
