"""Which hosts ssh cannot reach."""

from __future__ import annotations

from pathlib import Path

from horovod.runner.reach.check import unreachable

SSH = """#!/bin/sh
[ "$1 $2" = "-o BatchMode=yes" ] || exit 9
case $3 in
    good) exec $4 ;;
    unknown) echo "ssh: Could not resolve hostname unknown: Name or service not known" >&2; exit 255 ;;
    interrupted) kill -INT $$ ;;
    silent) exec sleep 60 ;;
esac
"""


def command(folder: Path) -> list[str]:
    path = folder / "ssh"
    path.write_text(SSH)
    path.chmod(0o755)
    return [str(path), "-o", "BatchMode=yes"]


def test_hosts_that_cannot_be_reached_are_told_with_the_reason(tmp_path: Path) -> None:
    found = unreachable(command(tmp_path), ["good", "unknown", "interrupted"], 60)
    assert list(found) == ["unknown"] and found["unknown"].startswith("its name is unknown: is it spelled correctly?")


def test_a_host_that_is_silent_is_given_up_and_nothing_is_left(tmp_path: Path) -> None:
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    assert unreachable(command(tmp_path), ["silent", "good"], 0.5) == {
        "silent": "it does not answer within 0.5 seconds"
    }
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_without_ssh_nothing_is_known(tmp_path: Path) -> None:
    assert unreachable([str(tmp_path / "ssh")], ["good"], 60) == {}
