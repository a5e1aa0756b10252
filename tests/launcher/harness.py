"""Starts real launchers, whose processes carry a tag, so that a test can say what is left of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import horovod
from time_limits import JOB, SOON

LIMIT_SECONDS, RUN_SECONDS = SOON, JOB
_TAG = "LAUNCHER_TEST_TAG"
_SOURCE = str(Path(horovod.__file__).resolve().parents[1])
EAGER = str(Path(__file__).resolve().parents[1] / "eager")
"""Scripts with a framework start faster with this folder in PYTHONPATH: see its files."""


@dataclass
class Launcher:
    """Starts ``horovodrun`` and what else a test needs, in an environment that marks all descendants."""

    folder: Path
    tag: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def environment(self, **extra: str) -> dict[str, str]:
        clean = {
            name: value for name, value in os.environ.items() if "HOROVOD" not in name and "NUM_THREADS" not in name
        }
        path = os.pathsep.join(filter(None, [_SOURCE, os.environ.get("PYTHONPATH")]))
        # "python" in a job is the one that runs the tests, whether or not its environment is activated.
        programs = os.pathsep.join(filter(None, [str(Path(sys.executable).parent), os.environ.get("PATH")]))
        path = os.pathsep.join([extra.get("PYTHONPATH", path), EAGER])
        return {**clean, "PATH": programs, _TAG: self.tag, **extra, "PYTHONPATH": path}

    def start(self, *arguments: str | Path, **extra: str) -> subprocess.Popen[str]:
        """``horovodrun`` with these arguments, its output in pipes."""
        return self.python("-m", "horovod.runner.launch", *map(str, arguments), **extra)

    def python(self, *arguments: str, **extra: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=self.environment(**extra),
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, *arguments: str | Path, **extra: str) -> subprocess.CompletedProcess[str]:
        """The same, to its end."""
        return finish(self.start(*arguments, **extra))

    def living(self) -> dict[int, str]:
        """Processes of this test that are alive: number and command line."""
        found: dict[int, str] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != os.getpid():
                try:
                    if f"{_TAG}={self.tag}".encode() in (entry / "environ").read_bytes():
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                except OSError:
                    pass
        return found

    def await_living(self, number: int) -> None:
        """Wait until so many processes of this test are alive: ranks fork and start others at their own pace."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while len(living := self.living()) < number:
            assert time.monotonic() < deadline, f"only these came: {living}"
            time.sleep(0.02)

    def await_nothing(self, seconds: float = LIMIT_SECONDS) -> None:
        """Fail unless all processes of this test end within ``seconds``, of which a test's own should outlast many."""
        deadline = time.monotonic() + seconds
        while living := self.living():
            assert time.monotonic() < deadline, f"left behind: {living}"
            time.sleep(0.05)

    def await_line(self, process: subprocess.Popen[str], text: str, times: int = 1, *, in_errors: bool = False) -> None:
        """Read the launcher's stdout, or stderr, up to the line with ``text``, so many times."""
        stream = process.stderr if in_errors else process.stdout
        assert stream is not None
        for _ in range(times):
            line = b""
            while text not in line.decode(errors="replace") or not line.endswith(b"\n"):
                byte = os.read(stream.fileno(), 1)  # no more than that: communicate() wants the rest
                assert byte, f"the launcher ended without saying {text!r}: {process.communicate()[1]}"
                line = byte if line.endswith(b"\n") else line + byte


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout=RUN_SECONDS)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def last_words(errors: str) -> str:
    """The last line of standard error, but for that which names the recorders: it follows where a rank noticed that another
    one had ended before it did itself."""
    return [line for line in errors.splitlines() if not line.startswith("horovodrun: what every rank did")][-1]
