"""A launcher on one of three hosts; at the end of every test nothing of the job is left on any."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from cluster.hosts import LIMIT_SECONDS, Hosts, obstacle, without_blanks
from cluster.training import TRAINING, Outcome, outcomes
from launcher.harness import Launcher, finish


def write(folder: Path, program: str) -> str:
    """Put a program for the ranks into ``folder``, which may import :mod:`cluster.plain` as ``plain``. Its name."""
    (folder / "plain.py").write_text((Path(__file__).parent / "plain.py").read_text())
    (folder / "job.py").write_text(program)
    return "job.py"


class Cluster:
    """``horovodrun`` on hostA, for ranks on all."""

    def __init__(self, hosts: Hosts, launcher: Launcher) -> None:
        self.hosts = hosts
        self.folder = launcher.folder
        self.launcher = launcher

    def script(self, text: str) -> str:
        """A program for the ranks, which may import :mod:`cluster.plain` as ``plain``."""
        return write(self.folder, text)

    def start(
        self, *words: str | Path, on: str = "hostA", ssh: str = "", config: str = "ssh_config", **extra: str
    ) -> subprocess.Popen[str]:
        """``horovodrun`` with these words, its output in pipes.

        Args:
            on: the host it runs on.
            ssh: options for ssh, before all others.
            config: its configuration file.
        """
        command = f"ssh {ssh} -F {self.hosts.folder / config}"
        process = subprocess.Popen(
            self.hosts.on(on, sys.executable, "-m", "horovod.runner.launch", *words, folder=self.folder),
            env=self.launcher.environment(HOROVOD_SSH_COMMAND=command, **extra),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.launcher.started.append(process)
        return process

    def run(self, *words: str | Path, **extra: str) -> subprocess.CompletedProcess[str]:
        return self.finish(self.start(*words, **extra))

    def start_command(self, *words: str | Path, **extra: str) -> subprocess.Popen[str]:
        """Any other program on hostA, its output in pipes."""
        return self.start_words(self.hosts.on("hostA", *words, folder=self.folder), **extra)

    def start_words(self, words: Sequence[str], **extra: str) -> subprocess.Popen[str]:
        """The same, of a command that enters a host (:meth:`Hosts.on`)."""
        process = subprocess.Popen(
            words,
            env=self.launcher.environment(**extra),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.launcher.started.append(process)
        return process

    @staticmethod
    def finish(process: subprocess.Popen[str], seconds: float = LIMIT_SECONDS) -> subprocess.CompletedProcess[str]:
        out, err = process.communicate(timeout=seconds)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def await_line(self, process: subprocess.Popen[str], text: str, times: int = 1) -> None:
        self.launcher.await_line(process, text, times)

    @staticmethod
    def launcher_of(process: subprocess.Popen[str]) -> int:
        """The launcher's process id: what was started is the program that entered the host."""
        (child,) = psutil.Process(process.pid).children()
        return child.pid


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    reason = obstacle()
    if reason:
        pytest.skip(reason)
    with without_blanks(tmp_path_factory.mktemp("hosts")) as folder:
        made = Hosts(folder)
        try:
            made.start()
            yield made
        finally:
            made.close()


@contextmanager
def _cluster(hosts: Hosts, folder: Path) -> Iterator[Cluster]:
    launcher = Launcher(folder)
    try:
        yield Cluster(hosts, launcher)
        hosts.await_nothing(5)
    finally:
        hosts.mend()
        for process in launcher.started:
            process.communicate(timeout=LIMIT_SECONDS)


@pytest.fixture
def cluster(hosts: Hosts, tmp_path: Path) -> Iterator[Cluster]:
    with _cluster(hosts, tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def shared_cluster(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """For several tests of one file, which do no more than look."""
    with _cluster(hosts, tmp_path_factory.mktemp("shared")) as made:
        yield made


@pytest.fixture(scope="session")
def one_host(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """What the training comes to when horovodrun starts it on this machine alone."""
    folder = tmp_path_factory.mktemp("one_host")
    launcher = Launcher(folder)
    write(folder, TRAINING + "train()\n")
    done = finish(launcher.start("-np", "4", "python", "job.py"))
    assert done.returncode == 0, done.stderr
    (found,) = set(outcomes(done.stdout))
    assert found.sizes == "4 1" and len(outcomes(done.stdout)) == 4
    return found
