"""An elastic job through random events, with real processes: it must go on after each, and end with the undisturbed result.

    python tests/elastic_events.py --events 300 --seed 1
    python tests/elastic_events.py --histories 1000 --seed 0     jobs of a few events each, every one with a seed of its own
    python tests/elastic_events.py --histories 200 --program ddp    the same with DistributedDataParallel

Hosts are agents on this machine, each in a namespace of processes of its own, which a stand-in for ssh starts. The events:

- ranks are killed, crash, raise an exception (with DistributedDataParallel), get SIGTERM, or are stopped for a moment or for
  good
- hosts are withdrawn and arrive
- the discovery script fails or hangs
- agents are killed or get SIGTERM
- a process that joins exits before ``init()``, or calls a collective before ``hvd.elastic.run``

They come one after another or several at once. One rank is always spared, as the job's state is lost with its last holder.
The program fails unless the job makes steps after each event, ends with exit code 0, has the weights that one process computes
in as many steps, to the bit, and leaves no process behind. It also fails if a commit is lost: no step may be made again after
a later one. And every rank that nothing has happened to, nor to its host, must finish in its process. A history may end with a
rank that returns from its training function early, or calls ``sys.exit(0)`` or ``os._exit(0)``. Then the job must fail, and
name that rank, unless no other was in the last round.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parent))

import elastic_ddp_rank
import elastic_events_rank
from launcher.harness import Launcher
from time_limits import SOON

PROGRAMS = {"numbers": elastic_events_rank, "ddp": elastic_ddp_rank}
HOSTS = ["alpha", "beta", "gamma"]
SLOTS = 2
UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
TIMEOUT_SECONDS = 8
"""After so long without progress the job blames a rank that is stopped."""
ELASTIC_SECONDS = 30
"""After so long the job gives up a rank that is stopped while a round begins."""
GOES_ON_SECONDS = 120
"""By then a job must make steps again after an event."""
STEPS = 3
SIGNALS = {"kill": signal.SIGKILL, "crash": signal.SIGSEGV, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
EARLY = ["return", "sys.exit", "os._exit"]
DISCOVERY = """#!/bin/bash
while [ -e {folder}/hangs ]; do sleep 0.1; done
[ -e {folder}/fails ] && exit 1
cat {folder}/hosts
"""
SHELL = f"""#!/bin/bash
exec {" ".join(UNSHARE)} /bin/sh -c "${{@: -1}}"
"""


class Member(NamedTuple):
    """A rank that has the state of the job.

    Attributes:
        pid: of its process, outside of its host's namespace.
        agent: that of its host's agent.
    """

    number: int
    pid: int
    agent: int
    host: str


class EventError(Exception):
    """The job has not come through; the text says what happened before."""


def available() -> bool:
    """Whether this machine allows namespaces of processes."""
    return subprocess.run([*UNSHARE, "true"], capture_output=True).returncode == 0


class ElasticEvents:
    """One job, and what happens to it.

    Args:
        folder: an empty one.
        seed: of the events.
        ends: how the job ends: all ranks finish, or one ends early by one of :data:`EARLY`.
        program: the ranks' program, by its name in :data:`PROGRAMS`.
    """

    def __init__(self, folder: Path, seed: int, ends: str = "finish", program: str = "numbers") -> None:
        self._program: Any = PROGRAMS[program]
        self._ends = ends
        self._folder = folder
        self._chance = random.Random(seed)
        self._launcher = Launcher(folder)
        self._hosts = list(HOSTS)
        self._spared: Member | None = None
        self._stopped: dict[int, float] = {}
        self._leaving: set[int] = set()
        self._furthest = 0
        self._seen: dict[int, Member] = {}
        self._withdrawn: set[str] = set()
        self._quiet_at = 0.0
        self.happened: list[str] = []

    def run(self, events: int, say: Callable[[str], None] = lambda text: None) -> str:
        """Play so many events. Returns how it went, in words. Raises :class:`EventError`."""
        self._write_programs()
        words = [
            "--host-discovery-script", quote(str(self._folder / "discover")), "--min-np", "1",
            "--elastic-timeout", str(ELASTIC_SECONDS),
            "--blacklist-cooldown-range", "1", "1", "--gloo-timeout-seconds", str(TIMEOUT_SECONDS),
            "python", str(self._program.__file__), str(self._folder),
        ]  # fmt: skip
        with (self._folder / "out").open("w") as out, (self._folder / "err").open("w") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "horovod.runner.launch", *words],
                env=self._launcher.environment(
                    HOROVOD_SSH_COMMAND=quote(str(self._folder / "shell")), OMP_NUM_THREADS="1"
                ),
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            try:
                self._await_steps(process)
                for _ in range(events):
                    self._event()
                    say(self.happened[-1])
                    if self._chance.random() < 0.6:
                        self._await_steps(process)
                    else:
                        time.sleep(
                            self._chance.uniform(0, 1.5)
                        )  # so that the next comes at any moment of a round's start
                        self._end_what_is_passing(by=time.monotonic())
                self._end_what_is_passing(by=float("inf"))
                self._await_steps(process)
                early = -1
                if self._ends == "finish":
                    (self._folder / "end").touch()
                else:
                    early = self._chance.choice(sorted(self._members())).number
                    (self._folder / "early.new").write_text(f"{early} {self._ends}")
                    (self._folder / "early.new").rename(self._folder / "early")
                    self.happened.append(f"{self._ends} of process {early}")
                try:
                    status = process.wait(GOES_ON_SECONDS)
                except subprocess.TimeoutExpired:
                    raise self._error("the job does not end") from None
                if early >= 0:
                    return self._judged_early(early, status)
                if status:
                    raise self._error(f"the job ended with exit code {status}")
                return self._judged()
            finally:
                self._end(process)

    # What happens.

    def _event(self) -> None:
        self._end_what_is_passing(by=time.monotonic())
        members, spared, living = self._members(), self._spared, self._launcher.living()
        if spared is None or spared.pid not in living:
            raise self._error("the rank that is spared is gone")
        self._stopped = {pid: until for pid, until in self._stopped.items() if pid in living}
        others = [each for each in members if each != spared and each.pid not in self._stopped]
        stays = [each for each in others if each.host in self._hosts and each.pid not in self._leaving]
        away = [host for host in HOSTS if host not in self._hosts]
        may_go = [host for host in self._hosts if host != spared.host]
        agents = {each.agent: each.host for each in others if each.host != spared.host}
        kinds: list[tuple[str, bool]] = [
            ("kill", bool(others)), ("kill", bool(others)), ("term", bool(others)),
            ("stop", bool(others) and not self._stopped),
            ("withdraw", bool(may_go)), ("arrive", bool(away)), ("arrive", bool(away)), ("fail", True), ("hang", True),
            ("agent killed", bool(agents)), ("agent ended", bool(agents)), ("spare", bool(stays)),
            ("newcomer exits", True), ("newcomer calls", True),
        ]  # fmt: skip
        kinds += [("crash", bool(others)), ("raise", bool(others) and hasattr(self._program, "RAISING"))]
        kind = self._chance.choice([name for name, possible in kinds if possible])
        what = kind
        if kind == "raise":
            one = self._chance.choice(others)
            where = self._chance.choice(self._program.RAISING)
            (self._folder / "raise.new").write_text(where)
            (self._folder / "raise.new").rename(self._folder / f"raise.{one.number}")
            self._leaving.add(one.pid)
            what = f"raise in {where} of process {one.number} on {one.host}"
        elif kind in SIGNALS:
            one = self._chance.choice(others)
            number = SIGNALS[kind]
            if kind == "stop":
                self._stopped[one.pid] = time.monotonic() + self._chance.choice([0.5, 2.0, 1000.0])
            _send(one.pid, number)
            self._leaving.add(one.pid)
            what = f"{kind} process {one.number} on {one.host}"
        elif kind == "withdraw":
            host = self._chance.choice(may_go)
            self._hosts.remove(host)
            self._withdrawn.add(host)
            self._write_hosts()
            what = f"withdraw {host}"
        elif kind == "arrive":
            host = self._chance.choice(away)
            self._hosts.append(host)
            self._write_hosts()
            what = f"arrive {host}"
        elif kind in ("fail", "hang"):
            (self._folder / f"{kind}s").touch()
            self._quiet_at = time.monotonic() + self._chance.uniform(0.5, 3.0)
        elif kind in ("agent killed", "agent ended"):
            pid = self._chance.choice(sorted(agents))
            _send(pid, signal.SIGKILL if kind == "agent killed" else signal.SIGTERM)
            self._leaving |= {each.pid for each in others if each.agent == pid}
            what = f"{kind} on {agents[pid]}"
        elif kind.startswith("newcomer"):
            (self._folder / kind.replace(" ", ".")).touch()
        else:
            self._spared = self._chance.choice(stays)
            what = f"spare process {self._spared.number} on {self._spared.host} from now on"
        self.happened.append(what)

    def _end_what_is_passing(self, by: float) -> None:
        """Let the discovery script work again, and stopped ranks go on, where their time has come."""
        if self._quiet_at and self._quiet_at <= by:
            self._quiet_at = 0.0
            for name in ("fails", "hangs"):
                (self._folder / name).unlink(missing_ok=True)
        for pid, until in list(self._stopped.items()):
            if until <= by:
                del self._stopped[pid]
                _send(pid, signal.SIGCONT)

    # What the job does.

    def _members(self) -> list[Member]:
        """The ranks of the round that began last, by process. While a round begins, some may be missing."""
        rounds: dict[int, list[Member]] = {}
        for pid, command in self._launcher.living().items():
            found = member(pid, command, self._program.__file__)
            path = self._folder / f"member.{found.number if found else -1}"
            if found is not None and path.exists():
                rounds.setdefault(int(path.read_text()), []).append(found)
        self._seen |= {each.pid: each for members in rounds.values() for each in members}
        return sorted(rounds[max(rounds)]) if rounds else []

    def _progress(self) -> tuple[int, int]:
        """The steps that the job has made, and the round."""
        path = self._folder / "progress"
        step, number = map(int, path.read_text().split() if path.exists() else ("0", "0"))
        if step < self._furthest:
            raise self._error(
                f"the job was at step {self._furthest}, all earlier ones committed, and is at step {step} now"
            )
        self._furthest = step
        return step, number

    def _await_steps(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until some steps were made with a rank that can be spared."""
        deadline = time.monotonic() + GOES_ON_SECONDS
        began, _ = self._progress()
        while True:
            self._end_what_is_passing(by=time.monotonic())
            members = [each for each in self._members() if each.pid not in self._stopped]
            if self._spared not in members:
                if self._spared is not None and self._spared.pid in self._launcher.living():
                    members = []  # it is about to begin a round
                elif self._spared is not None:
                    raise self._error("the rank that is spared has ended")
            if self._progress()[0] >= began + STEPS and members:
                self._spared = self._spared or self._chance.choice(members)
                return
            if process.poll() is not None:
                raise self._error(f"the job ended with exit code {process.returncode}")
            if time.monotonic() > deadline:
                raise self._error(f"no steps in {GOES_ON_SECONDS} s: {self._progress()}, {members}")
            time.sleep(0.05)

    def _judged(self) -> str:
        results = [json.loads(path.read_text()) for path in self._folder.glob("result.*")]
        if not results:
            raise self._error("no rank has a result")
        if wrong := self._program.judge(results):
            raise self._error(wrong)
        spared = [each for each in self._seen.values() if not {each.pid, each.host} & (self._leaving | self._withdrawn)]
        if ended := [each for each in spared if not (self._folder / f"result.{each.number}").exists()]:
            raise self._error(f"nothing had happened to these processes, and they have not finished: {ended}")
        kinds = Counter(
            " ".join(each.split()[:2] if each.startswith("agent") else each.split()[:1]) for each in self.happened
        )
        counted = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
        went = f"{len(self.happened)} events ({counted}), {self._progress()[1]} rounds, {results[0][0]} steps"
        return f"{went}, the undisturbed result"

    def _judged_early(self, early: int, status: int) -> str:
        if not (self._folder / f"early.{early}").exists():
            raise self._error(f"process {early} has not ended early, and the job ended with exit code {status}")
        rounds = {path.suffix: int(path.read_text()) for path in self._folder.glob("member.[0-9]*")}
        others = [each for each, last in rounds.items() if last == max(rounds.values()) and each != f".{early}"]
        text = (self._folder / "err").read_text()
        named = re.search(rf"the job ended: Process {early} \(rank \d+, on \w+\) .*ended with exit code 0 before", text)
        if bool(status) != bool(others) or (status and not named):
            raise self._error(f"exit code {status} although {others} were in the last round, too; named: {named}")
        return f"{'; '.join(self.happened)}: exit code {status}"

    # Files and processes.

    def _write_programs(self) -> None:
        self._write_hosts()
        for name, text in (("discover", DISCOVERY.format(folder=quote(str(self._folder)))), ("shell", SHELL)):
            (self._folder / name).write_text(text)
            (self._folder / name).chmod(0o755)

    def _write_hosts(self) -> None:
        (self._folder / "hosts.new").write_text("".join(f"{host}:{SLOTS}\n" for host in self._hosts))
        (self._folder / "hosts.new").rename(self._folder / "hosts")

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """End what is left, and fail if a job that has ended has left something."""
        orderly = process.poll() is not None
        self._end_what_is_passing(by=float("inf"))
        if not orderly:
            process.terminate()
            try:
                process.wait(SOON)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        deadline = time.monotonic() + SOON
        while (left := self._launcher.living()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:
            _send(pid, signal.SIGKILL)
        if left and orderly and sys.exc_info()[0] is None:
            raise self._error(f"left behind: {left}")

    def _error(self, what: str) -> EventError:
        text = (self._folder / "err").read_text()[-4000:]
        return EventError(f"{what}\nafter: {'; '.join(self.happened[-12:])}\n{text}")


def member(pid: int, command: str, program: str) -> Member | None:
    if program not in command or "horovod.runner" in command:
        return None
    try:
        environment = dict(_environment(pid))
        agent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return Member(int(environment["HOROVOD_ELASTIC_PROCESS"]), pid, agent, environment["HOROVOD_HOSTNAME"])
    except (OSError, KeyError, ValueError):
        return None  # it has just ended, or is about to begin


def _environment(pid: int) -> Iterator[tuple[str, str]]:
    for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        name, _, value = entry.decode(errors="replace").partition("=")
        yield name, value


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it has ended meanwhile


def play_histories(first: int, count: int, program: str) -> int:
    """The number of histories that have gone wrong."""
    wrong = 0
    for seed in range(first, first + count):
        chance = random.Random(seed)
        ends, events = chance.choice(["finish", *EARLY]), chance.randrange(5)
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="elastic-events-") as folder:
            try:
                went = ElasticEvents(Path(folder), seed, ends, program).run(events)
            except EventError as error:
                went, wrong = f"WRONG {error}", wrong + 1
        print(f"seed {seed}, {time.monotonic() - began:.0f} s, {ends}: {went}", flush=True)
    print(f"{count} histories, seeds {first} to {first + count - 1}: {wrong} wrong")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=300)
    parser.add_argument("--histories", type=int, default=0, help="so many jobs of 0 to 4 events instead of one")
    parser.add_argument("--seed", type=int, default=0, help="of the job, or of the first history")
    parser.add_argument("--program", choices=sorted(PROGRAMS), default="numbers", help="what the ranks do")
    options = parser.parse_args()
    if not available():
        parser.error("this machine allows no namespaces of processes (unshare --pid)")
    if options.histories:
        return play_histories(options.seed, options.histories, options.program)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="elastic-events-") as folder:
        try:
            events = ElasticEvents(Path(folder), options.seed, program=options.program)
            print(events.run(options.events, lambda text: print(text, flush=True)))
        except EventError as error:
            print(error)
            return 1
        finally:
            print(f"{time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
