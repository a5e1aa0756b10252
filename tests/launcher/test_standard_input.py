"""Who reads standard input: a debugger in a rank works at a real terminal and through a pipe, and disturbs nobody."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from shlex import quote

import pytest

from launcher.harness import LIMIT_SECONDS, Launcher, finish

DEBUGGED = """
import os
x = 41
if os.environ["HOROVOD_RANK"] == os.environ.get("DEBUGGED", "0"):
    breakpoint()
y = x + 1
print("y is", y)
"""


class Terminal:
    """A program at a terminal of its own: what a person types and sees."""

    def __init__(self, launcher: Launcher, command: list[str], **environment: str) -> None:
        self._launcher = launcher
        self.master, slave = os.openpty()
        # In its own session, the first terminal that a process opens becomes the one that controls it.
        take = f"import os, sys; os.open({os.ttyname(slave)!r}, os.O_RDWR); os.execvp(sys.argv[1], sys.argv[1:])"
        self.process = subprocess.Popen(
            [sys.executable, "-c", take, *command],
            env=launcher.environment(PYTHON_COLORS="0", TERM="dumb", PS1="$ ", **environment),
            cwd=launcher.folder,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def await_text(self, text: str) -> str:
        """What is shown until ``text`` appears, which is then taken as seen."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while text not in self.shown:
            assert self._read(deadline), f"{text!r} does not come; there is: {self.shown}"
        seen, _, self.shown = self.shown.partition(text)
        return seen

    def end(self) -> tuple[int, str]:
        """The exit status, and what has been shown since."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while self._read(deadline):
            pass
        return self.process.wait(LIMIT_SECONDS), self.shown

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
        try:
            data = os.read(self.master, 4096) if ready else b""
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return False  # nobody has the terminal any more
        self.shown += data.decode().replace("\r\n", "\n")
        return bool(data)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)


Start = Callable[..., Terminal]
"""``horovodrun`` with these words, at a terminal."""


@pytest.fixture
def script(launcher: Launcher) -> str:
    path = launcher.folder / "debugged.py"
    path.write_text(DEBUGGED)
    return str(path)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    made: list[Terminal] = []
    yield made
    for terminal in made:
        terminal.close()


@pytest.fixture
def at_terminal(launcher: Launcher, terminals: list[Terminal]) -> Start:
    def start(*words: str, **environment: str) -> Terminal:
        terminals.append(Terminal(launcher, [sys.executable, "-m", "horovod.runner.launch", *words], **environment))
        return terminals[-1]

    return start


def test_a_debugger_prompts_and_answers(at_terminal: Start, script: str) -> None:
    terminal = at_terminal("-np", "1", "python", script)
    terminal.await_text("[0]<stdout>:(Pdb) ")  # at once, though no line ends there
    terminal.type("p x + 100\n")
    assert terminal.await_text("\n[0]<stdout>:(Pdb) ") == "p x + 100\n141"
    terminal.type("c\n")
    status, shown = terminal.end()
    assert (status, shown) == (0, "c\ny is 42\n")


def test_a_debugger_in_a_chosen_rank(at_terminal: Start, script: str) -> None:
    terminal = at_terminal("-np", "2", "--stdin", "1", "python", script, DEBUGGED="1")
    terminal.await_text("[1]<stdout>:(Pdb) ")
    terminal.type("p x + 100\n")
    terminal.await_text("141\n[1]<stdout>:(Pdb) ")
    terminal.type("c\n")
    assert terminal.end()[0] == 0


def test_other_ranks_do_not_write_into_the_prompt(at_terminal: Start, tmp_path: Path) -> None:
    prompted = tmp_path / "prompted"
    reader = "printf 'your name? '; read name; echo hello $name"
    other = f"for _ in $(seq 600); do [ -e {quote(str(prompted))} ] && break; sleep 0.1; done; echo from the other; sleep 1000"
    terminal = at_terminal(
        "-np", "2", "--stdin", "0", "sh", "-c", f"[ $HOROVOD_RANK = 0 ] && {{ {reader}; }} || {{ {other}; }}"
    )
    terminal.await_text("[0]<stdout>:your name? ")
    prompted.touch()
    terminal.await_text("\n[1]<stdout>:from the other\n")
    terminal.type("me\n")
    terminal.await_text("[0]<stdout>:hello me\n")
    terminal.type("\x03")
    assert terminal.end()[0] == 130


def test_ctrl_d_ends_the_input(at_terminal: Start, script: str) -> None:
    terminal = at_terminal("-np", "1", "python", script)
    terminal.await_text("(Pdb) ")
    terminal.type("\x04")
    status, shown = terminal.end()
    assert status == 1
    assert "BdbQuit" in shown


def test_ctrl_c_at_the_prompt_goes_to_the_debugger(at_terminal: Start, script: str) -> None:
    terminal = at_terminal("-np", "1", "python", script)
    terminal.await_text("(Pdb) ")
    terminal.type("\x03")
    terminal.await_text("Ctrl-C went to rank 0")
    terminal.await_text("--KeyboardInterrupt--")
    terminal.await_text("(Pdb) ")
    terminal.type("p x + 100\n")
    terminal.await_text("141")
    time.sleep(1)  # the next one is not meant for the job either
    terminal.type("\x03")
    terminal.await_text("--KeyboardInterrupt--")
    terminal.type("c\n")
    assert terminal.end()[0] == 0


def test_ctrl_c_ends_a_rank_that_computes_and_with_it_the_job(at_terminal: Start) -> None:
    terminal = at_terminal("-np", "1", "python", "-c", "print('ready'); import time; time.sleep(1000)")
    terminal.await_text("ready")
    terminal.type("\x03")
    status, shown = terminal.end()
    assert status == 130
    assert "KeyboardInterrupt" in shown
    assert shown.splitlines()[-1] == "horovodrun: ended by SIGINT"


def test_ctrl_c_twice_ends_a_job_whose_rank_takes_no_notice(at_terminal: Start) -> None:
    terminal = at_terminal("-np", "1", "sh", "-c", "trap '' INT; echo ready; sleep 1000")
    terminal.await_text("ready")
    terminal.type("\x03")
    terminal.await_text("press it twice within a second")
    time.sleep(0.5)
    terminal.type("\x03")
    status, shown = terminal.end()
    assert status == 130
    assert "horovodrun: SIGINT: ending the job" in shown


def test_ctrl_c_ends_a_job_without_a_reader_of_standard_input(at_terminal: Start) -> None:
    terminal = at_terminal("-np", "2", "sh", "-c", "echo ready; sleep 1000")
    terminal.await_text("ready")
    terminal.type("\x03")
    status, shown = terminal.end()
    assert status == 130
    assert "Ctrl-C went to" not in shown


def shell(launcher: Launcher, terminals: list[Terminal], command: str, **environment: str) -> Terminal:
    """A shell with job control, at which a command is typed."""
    terminal = Terminal(launcher, ["bash", "--norc", "--noprofile", "--noediting", "-i"], **environment)
    terminals.append(terminal)
    terminal.await_text("$ ")
    terminal.type(command + "\n")
    terminal.await_text(command + "\n")
    return terminal


def await_stopped(launcher: Launcher, word: str) -> None:
    """Wait until no process with ``word`` as its last argument runs or could."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while True:
        found = [number for number, line in launcher.living().items() if line.split()[-1] == word]
        states = [Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] for number in found]
        if set(states) in ({"T"}, {"T", "D"}):  # a shell is in D while a child that it has just made is stopped
            return
        assert time.monotonic() < deadline, f"the states are {states}"
        time.sleep(0.02)


def test_ctrl_z_stops_the_ranks_and_fg_has_them_go_on(launcher: Launcher, terminals: list[Terminal]) -> None:
    run = f"{sys.executable} -m horovod.runner.launch -np 2 --stdin 0"
    terminal = shell(
        launcher, terminals, f"{run} sh -c 'echo ready; read x; [ $x ] || sleep 1000; echo got $x; kill 0' rank"
    )
    terminal.await_text("]<stdout>:ready")
    terminal.await_text("]<stdout>:ready")
    terminal.type("\x1a")
    terminal.await_text("Stopped")
    await_stopped(launcher, "rank")
    terminal.type("fg\n")
    terminal.await_text("launch -np 2")
    terminal.type("words\n")
    terminal.await_text("[0]<stdout>:got words\n")
    terminal.await_text("$ ")
    terminal.type("exit\n")
    terminal.end()


def test_a_job_in_the_background_leaves_the_terminal_to_the_shell(
    launcher: Launcher, terminals: list[Terminal]
) -> None:
    run = f"{sys.executable} -m horovod.runner.launch -np 1"
    terminal = shell(launcher, terminals, f"{run} sh -c 'read x; echo got ${{x:-nothing}}; sleep 1' rank &")
    terminal.await_text("[0]<stdout>:got nothing\n")
    terminal.type("echo typed at the shell\n")
    terminal.await_text("\ntyped at the shell\n")
    terminal.type("wait; exit\n")
    assert terminal.end()[0] == 0


# Through a pipe.


def test_a_debugger_can_be_driven_through_a_pipe(launcher: Launcher, script: str) -> None:
    process = launcher.start("-np", "1", "python", script)
    out, _ = process.communicate("p x + 100\nc\n", timeout=LIMIT_SECONDS)
    assert process.returncode == 0
    assert out.splitlines()[2:] == ["[0]<stdout>:(Pdb) 141", "[0]<stdout>:(Pdb) y is 42"]


def test_standard_input_that_is_closed_is_empty(launcher: Launcher) -> None:
    command = ["sh", "-c", f"{sys.executable} -m horovod.runner.launch -np 1 wc -c <&-"]
    done = subprocess.run(command, env=launcher.environment(), capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0]<stdout>:0\n", "")


def test_a_rank_reads_a_file_whole(launcher: Launcher, tmp_path: Path) -> None:
    numbers = tmp_path / "numbers"
    numbers.write_text("".join(f"{number}\n" for number in range(100_000)))
    with numbers.open() as stream:
        command = [sys.executable, "-m", "horovod.runner.launch", "-np", "1", "wc", "-l"]
        done = subprocess.run(command, stdin=stream, env=launcher.environment(), capture_output=True, text=True)
    assert done.stdout.split(":")[1].split()[0] == "100000"


@pytest.mark.parametrize(
    "words",
    [("-np", "2"), ("-np", "1", "--stdin", "none"), ("-np", "2", "--stdin", "None"), ("-np", "2", "--stdin", "1")],
)
def test_the_others_have_nothing_to_read(launcher: Launcher, words: tuple[str, ...]) -> None:
    process = launcher.start(*words, "sh", "-c", "read x; echo got ${x:-nothing}")
    out, _ = process.communicate("words\n", timeout=LIMIT_SECONDS)
    got = dict(line.split("<stdout>:got ") for line in out.splitlines())
    reader = "[1]" if "1" in words[2:] and words[1] == "2" else ""
    assert got == {rank: "words" if rank == reader else "nothing" for rank in got} and len(got) == int(words[1])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-np", "2", "--stdin", "2"), "--stdin 2: the last of 2 ranks is rank 1"),
        (("-np", "2", "--stdin", "all"), "must be the number of one rank, or none, not 'all'"),
        (("-np", "2", "--stdin", "-1"), "must be the number of one rank, or none, not '-1'"),
    ],
)
def test_a_wrong_rank_is_refused(launcher: Launcher, words: tuple[str, ...], message: str) -> None:
    done = launcher.run(*words, "true")
    assert done.returncode == 2
    assert message in done.stderr


def test_a_prompt_of_one_rank_is_shown_before_it_is_answered(launcher: Launcher) -> None:
    process = launcher.start("-np", "1", "sh", "-c", "printf 'your name? '; read name; printf 'hello %s' $name")
    assert process.stdout is not None and process.stdin is not None
    shown = b""
    while not shown.endswith(b"[0]<stdout>:your name? "):
        shown += os.read(process.stdout.fileno(), 1)
    process.stdin.write("me\n")
    process.stdin.flush()
    assert finish(process).stdout == "hello me\n"


def test_signals_that_are_sent_end_a_job_whose_rank_reads_a_pipe(launcher: Launcher) -> None:
    process = launcher.start("-np", "1", "sh", "-c", "trap '' INT; echo ready; sleep 1000")
    launcher.await_line(process, "ready")
    process.send_signal(signal.SIGINT)
    assert finish(process).returncode == 130
