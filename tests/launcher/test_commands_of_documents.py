"""The commands of the pages on what a job does, run as they stand there: each does what the page says."""

from __future__ import annotations

import importlib.util
import os
import pty
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from launcher.harness import Launcher, finish
from part import some
from time_limits import SOON

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = (
    "why-does-my-job-hang.md", "diagnose.md", "why-is-my-job-slow.md", "autotune.md", "troubleshooting.md",
)  # fmt: skip
COMMAND = re.compile(r"^    ((?:[A-Z_]+=\S+ )*(?:horovodrun|python -m horovod\.\w+) .+)$", re.MULTILINE)
QUOTED = re.compile(r"```text\n(.*?)^```", re.MULTILINE | re.DOTALL)

SCRIPT = """
import os
import time

import torch
import horovod.torch as hvd

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(64, 64)
hvd.broadcast_parameters(model.state_dict(), 0)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001), model.named_parameters())
for step in range(int(os.environ.get("STEPS", "60"))):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    time.sleep(0.02 * hvd.rank() + float(os.environ.get("PAUSE", "0")))
    if step == 3:
        print("trains", flush=True)
"""


def commands(page: str) -> list[tuple[str, str]]:
    """The commands of a page without their comments, each with the first quotation below it."""
    text = (DOCS / page).read_text()
    found = []
    for match in COMMAND.finditer(text):
        quoted = QUOTED.search(text, match.end())
        command = re.sub(r"\s+#.*", "", match[1]).replace("DIR [DIR ...]", "DIR")
        found.append((command, "" if quoted is None else quoted[1]))
    return found


@pytest.mark.parametrize("page", some(PAGES, PAGES[:2]))
def test_the_commands_of_a_page_do_what_it_says(page: str, launcher: Launcher) -> None:
    pytest.importorskip("torch")
    found = commands(page)
    assert found
    (launcher.folder / "train.py").write_text(SCRIPT)
    of_a_job = [command for command, _ in found if re.search(r"\b(PID|DIR)\b", command)]
    job = running(launcher) if of_a_job else None
    for command, quoted in found:
        if lacking(command):
            continue
        if job is not None:
            command = re.sub(r"\bPID\b", str(job.pid), command)
        command = re.sub(r"\bDIR\b", "recorders", command)
        if "--top" in command:
            looked_at(launcher, command)
            continue
        done = finish(start(launcher, command))
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        if re.search(r"horovod\.timeline timeline\.json$", command):
            parts = map(re.escape, quoted.strip().split("..."))
            assert re.search(".*?".join(parts), done.stdout, re.DOTALL), done.stdout
        for made in re.findall(r"--(?:plot|html|pytorch|timeline-filename) (\S+)", command):
            assert (launcher.folder / made).exists(), f"{command}\n{done.stdout}{done.stderr}"
        if "--dump" in command or "horovod.diagnose" in command:
            assert re.search(r'What happened|"findings"|rank_0', done.stdout) or "--pytorch" in command, done.stdout
        if "HOROVOD_DEBUG" in command:
            assert "not finite" not in done.stderr and "drifted" not in done.stderr, "nothing is wrong in this script"
    if job is not None:
        job.terminate()
        job.communicate(timeout=SOON)


def running(launcher: Launcher) -> subprocess.Popen[str]:
    """A job that trains, whose ranks have written once."""
    recorders = str(launcher.folder / "recorders")
    settings = {"STEPS": str(10**9), "PAUSE": "0.2", "HOROVOD_FLIGHT_RECORDER_DIR": recorders}
    job = launcher.start("-np", "2", "python", "train.py", **settings)
    launcher.await_line(job, "trains", times=2)
    assert launcher.run("--dump", str(job.pid)).returncode == 0
    return job


def start(launcher: Launcher, command: str) -> subprocess.Popen[str]:
    words = shlex.split(command)
    extra = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        extra[name] = value
    if "--autotune" in words:
        extra["HOROVOD_AUTOTUNE_FILE"] = str(launcher.folder / "choice.json")
    if words[0] == "horovodrun":
        return launcher.start(*words[1:], **extra)
    assert words[0] == "python"
    return launcher.python(*words[1:], **extra)


def looked_at(launcher: Launcher, command: str) -> None:
    """Run a view on a terminal until it shows the job, and end it with Ctrl-C."""
    terminal, end = pty.openpty()
    words = shlex.split(command)
    view = subprocess.Popen(
        ["python", "-m", "horovod.runner.launch", *words[1:]],
        env=launcher.environment(COLUMNS="160", LINES="40", TERM="xterm"),
        cwd=launcher.folder,
        stdin=end,
        stdout=end,
        stderr=end,
    )
    os.close(end)
    shown = b""
    try:
        while b"2 ranks on 1 host" not in shown:
            shown += os.read(terminal, 1 << 12)  # raises when the view has ended
        view.send_signal(signal.SIGINT)
        assert view.wait(timeout=SOON) == 0
    finally:
        view.kill()
        view.wait()
        os.close(terminal)


def lacking(command: str) -> bool:
    """Whether a command needs a package that is not installed here."""
    needed = {"--plot": "matplotlib", "--top": "rich", "--autotune": "optuna"}
    return any(word in command and importlib.util.find_spec(package) is None for word, package in needed.items())
