"""What a person sees of the ranks: every line whole, labelled and at once."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from launcher.harness import LIMIT_SECONDS, Launcher, finish

LABEL = re.compile(r"\[(\d+)\]<(stdout|stderr)>:")


def test_lines_are_labelled_with_rank_and_stream(launcher: Launcher) -> None:
    done = launcher.run("-np", "2", "sh", "-c", "echo hello; echo trouble >&2")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[0]<stdout>:hello", "[1]<stdout>:hello"]
    assert sorted(done.stderr.splitlines()) == ["[0]<stderr>:trouble", "[1]<stderr>:trouble"]


def test_lines_of_busy_ranks_never_mix(launcher: Launcher) -> None:
    program = """
import os, sys
rank = int(os.environ["HOROVOD_RANK"])
for number in range(3000):
    line = f"{rank}-{number}-" + "x" * (number * 7 % 300) + "."
    cut = number % len(line)
    os.write(1, line[:cut].encode())
    os.write(1, line[cut:].encode() + b"\\n")
"""
    done = launcher.run("-np", "4", "python", "-c", program)
    lines: Counter[int] = Counter()
    for line in done.stdout.splitlines():
        match = re.fullmatch(r"\[(\d)\]<stdout>:(\d)-(\d+)-x*\.", line)
        assert match is not None and match[1] == match[2], line
        assert int(match[3]) == lines[int(match[1])]  # in the rank's own order
        lines[int(match[1])] += 1
    assert lines == dict.fromkeys(range(4), 3000)


def test_output_appears_while_the_rank_still_runs(launcher: Launcher) -> None:
    process = launcher.start("-np", "1", "python", "-c", "print('now'); import time; time.sleep(1000)")
    launcher.await_line(process, "[0]<stdout>:now")
    process.terminate()
    finish(process)


def test_odd_lines(launcher: Launcher) -> None:
    # A progress bar, a line end split from it, bytes that are no text, a last line without an end.
    done = launcher.run("-np", "1", "printf", r"\r50%%\rdone\r\nn\303\244h\377\nend")
    assert done.stdout == "[0]<stdout>:50%\n[0]<stdout>:done\n[0]<stdout>:näh\ufffd\n[0]<stdout>:end\n"  # \r read as \n


def test_a_carriage_return_stays_one(launcher: Launcher) -> None:
    process = launcher.start("-np", "1", "printf", r"50%%\r100%%\n")
    assert process.stdout is not None
    assert process.stdout.buffer.read() == b"[0]<stdout>:50%\r[0]<stdout>:100%\n"


def test_timestamps_stand_before_the_label(launcher: Launcher) -> None:
    done = launcher.run("-np", "1", "--prefix-output-with-timestamp", "echo", "hello")
    assert re.fullmatch(r"\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}\[0\]<stdout>:hello\n", done.stdout)


def test_output_files_hold_what_the_console_shows(launcher: Launcher, tmp_path: Path) -> None:
    done = launcher.run("-np", "2", "--output-filename", tmp_path / "out", "sh", "-c", "echo a; echo b >&2")
    assert sorted(done.stdout.splitlines()) == ["[0]<stdout>:a", "[1]<stdout>:a"]
    for rank in range(2):
        assert (tmp_path / "out" / f"rank.{rank}" / "stdout").read_text() == f"[{rank}]<stdout>:a\n"
        assert (tmp_path / "out" / f"rank.{rank}" / "stderr").read_text() == f"[{rank}]<stderr>:b\n"


def test_folders_of_many_ranks_sort_by_rank(launcher: Launcher, tmp_path: Path) -> None:
    launcher.run("-np", "11", "--output-filename", tmp_path / "out", "true")
    assert sorted(path.name for path in (tmp_path / "out").iterdir())[:3] == ["rank.00", "rank.01", "rank.02"]


def test_one_rank_has_a_folder_too(launcher: Launcher, tmp_path: Path) -> None:
    assert launcher.run("-np", "1", "--output-filename", tmp_path, "echo", "hello").returncode == 0
    assert (tmp_path / "rank.0" / "stdout").read_text() == "[0]<stdout>:hello\n"


def test_a_reader_that_has_seen_enough_ends_the_job(launcher: Launcher) -> None:
    process = launcher.start("-np", "2", "yes")
    launcher.await_line(process, "y")
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(LIMIT_SECONDS) == 128 + 13


def test_closed_standard_streams_are_not_reused_for_other_files(launcher: Launcher) -> None:
    script = f"{sys.executable} -m horovod.runner.launch -np 2 echo hello"
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        command = ["sh", "-c", f"{script} {closed}"]
        done = subprocess.run(command, env=launcher.environment(), capture_output=True, timeout=LIMIT_SECONDS)
        assert done.returncode == 0
        assert done.stdout.count(b"hello") == (0 if " >&-" in f" {closed}" else 2)


def test_much_output_passes_unharmed(launcher: Launcher) -> None:
    done = launcher.run("-np", "2", "sh", "-c", "seq 200000")
    numbers = [line for line in done.stdout.splitlines() if line.startswith("[1]")]
    assert numbers == [f"[1]<stdout>:{number}" for number in range(1, 200001)]


def test_the_launcher_says_what_it_does_only_when_asked(launcher: Launcher) -> None:
    assert launcher.run("-np", "2", "true").stderr == ""
    words = launcher.run("-np", "2", "--verbose", "true").stderr
    assert "rank 1: localhost, local rank 1" in words
    assert "OMP_NUM_THREADS=" in words


def test_a_flag_without_effect_says_so_once(launcher: Launcher) -> None:
    done = launcher.run("-np", "3", "-p", "22", "--disable-cache", "true")
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "horovodrun: --disable-cache has no effect: nothing is cached",
        "horovodrun: --ssh-port has no effect: all ranks run on this machine",
    ]


def test_the_secret_is_not_visible(launcher: Launcher) -> None:
    process = launcher.start("-np", "1", "--verbose", "sh", "-c", "echo $_HOROVOD_SECRET_KEY; sleep 1000")
    assert process.stdout is not None
    secret = process.stdout.readline().strip().partition(":")[2]
    assert len(secret) > 30
    assert secret not in subprocess.check_output(["ps", "-eo", "args"], text=True)
    process.terminate()
    assert secret not in finish(process).stderr


DISAGREE = """
import os, sys
import numpy as np
from horovod._models.contents import described
from horovod.common.basics import init
from horovod.core.submission.collectives import allreduce, broadcast
init()
what, *catch = sys.argv[1:]
what = what if os.environ["HOROVOD_RANK"] == "1" else ""
tensors = [described(np.zeros(3 if what == "shapes" else 2, "i4" if what == "types" else "f4"))]
try:
    if what == "operations":
        broadcast("same", "x", tensors, 0).wait()
    else:
        allreduce("same", "x", tensors, tensors).wait()
except RuntimeError as error:
    if not catch:
        raise
    print(error, file=sys.stderr)
"""


@pytest.mark.parametrize("what", ["shapes", "types", "operations"])
def test_an_error_of_all_ranks_is_shown_once_and_stands_in_every_file(
    launcher: Launcher, tmp_path: Path, what: str
) -> None:
    (tmp_path / "train.py").write_text(DISAGREE)
    done = launcher.run("-np", "3", "--output-filename", tmp_path / "out", "python", tmp_path / "train.py", what)
    assert done.returncode == 1
    kept = [(tmp_path / "out" / f"rank.{rank}" / "stderr").read_text() for rank in range(3)]
    messages = {line for each in kept for line in re.findall(r"MismatchError: (.+)", each)}
    assert len(messages) == 1 and what in messages.pop(), kept
    assert done.stderr.count("as each rank submitted it") == 1, done.stderr
    assert len(re.findall(r"\[\d\]<stderr>:.* as \[\d\] above", done.stderr)) == 2, done.stderr
    assert [each.count("Traceback") for each in kept] == [1, 1, 1]
    # The stack of a rank that has come there by another line is shown, too.
    assert done.stderr.count("Traceback") == (2 if what == "operations" else 1), done.stderr
    assert "Reason: MismatchError, as printed above\n" in done.stderr


def test_an_error_that_scripts_catch_and_print_is_shown_of_every_rank(launcher: Launcher) -> None:
    done = launcher.run("-np", "3", "python", "-c", DISAGREE, "shapes", "caught")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("as each rank submitted it") == 3, done.stderr
