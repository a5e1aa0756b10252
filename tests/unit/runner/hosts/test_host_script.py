"""A command that prints the available hosts."""

from __future__ import annotations

import time
from pathlib import Path
from shlex import quote

import psutil
import pytest

from horovod.control.wakeup import WakeUp
from horovod.runner.hosts.host_sources import HostScript
from horovod.runner.hosts.slots import HostInfo
from time_limits import SOON


@pytest.mark.parametrize(
    ("command", "slots", "expected"),
    [
        ("echo a:2; echo b:1", None, [HostInfo("a", 2), HostInfo("b", 1)]),
        ("printf 'a\\n\\n  b:3  \\n'", 4, [HostInfo("a", 4), HostInfo("b", 3)]),
        ("echo a:1; echo b:1; echo a:1", None, [HostInfo("a", 1), HostInfo("b", 1)]),
        ("echo a:1; echo a:3", None, [HostInfo("a", 3)]),
        ("echo a:2; echo b:0; echo me@c:1", None, [HostInfo("a", 2), HostInfo("c", 1, "me")]),
        ("true", None, []),
        ("echo a warning >&2; echo a:1", None, [HostInfo("a", 1)]),
    ],
)
def test_the_script_prints_the_hosts(command: str, slots: int | None, expected: list[HostInfo]) -> None:
    assert HostScript(command, slots).hosts(1) == expected


def test_the_script_runs_each_time_that_hosts_are_asked_for(tmp_path: Path) -> None:
    listed = tmp_path / "hosts"
    source = HostScript(f"cat {quote(str(listed))}")
    for text in ("a:1\n", "a:1\nb:2\n", ""):
        listed.write_text(text)
        assert len(source.hosts(1)) == len(text.split())


def test_the_script_may_be_a_path_with_spaces(tmp_path: Path) -> None:
    script = tmp_path / "the hosts"
    script.write_text("#!/bin/sh\necho a:2\n")
    script.chmod(0o755)
    assert HostScript(str(script)).hosts(1) == [HostInfo("a", 2)]


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("echo a", "printed 'a' without slots: print a:2, or say with --slots-per-host"),
        (
            "echo localhost:99999999999",
            "printed 'localhost:99999999999', which is not of the form host or host:2 with at most 65536",
        ),
        ("echo two words:2", "printed 'two words:2', which is not of the form host or host:2"),
        ("echo a:many", "printed 'a:many'"),
        ("echo no cluster >&2; exit 3", "ended with exit status 3: no cluster"),
        ("no-such-program-at-all", "exit status 127: .*not found"),
        ("kill -9 $$", "was killed by SIGKILL"),
        ("printf '\\377'", "wrote something other than UTF-8 text"),
        ("yes a:1", "wrote more than 1048576 bytes"),
    ],
)
def test_errors_of_the_script_are_explained(command: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        HostScript(command).hosts(1)


def test_a_script_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    note = tmp_path / "child"
    with pytest.raises(ValueError, match=r"did not end within 0\.5 seconds"):
        HostScript(f"sleep 1000 & echo $! > {quote(str(note))}; wait", seconds=0.5).hosts(1)
    await_end(int(note.read_text()))


def test_a_script_that_closes_its_streams_and_hangs_is_ended(tmp_path: Path) -> None:
    note = tmp_path / "script"
    with pytest.raises(ValueError, match=r"host discovery script .* did not end within 0\.5 seconds"):
        HostScript(f"echo $$ > {quote(str(note))}; exec >&- 2>&-; sleep 1000", seconds=0.5).hosts(1)
    await_end(int(note.read_text()))


def test_a_script_that_hangs_is_ended_with_the_job(tmp_path: Path) -> None:
    note = tmp_path / "script"
    cancel = WakeUp()
    cancel.set()
    with pytest.raises(ValueError, match="because the job ends"):
        HostScript(f"echo $$ > {quote(str(note))}; sleep 1000", seconds=1000).hosts(1, cancel.fileno())
    cancel.close()
    if note.exists() and note.read_text():  # it may have been ended before it wrote
        await_end(int(note.read_text()))


def await_end(process: int) -> None:
    deadline = time.monotonic() + SOON
    while psutil.pid_exists(process) and psutil.Process(process).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)
