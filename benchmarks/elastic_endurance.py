"""A long elastic job through random losses and arrivals: nothing accumulates, and the loss of the model goes down.

    python benchmarks/elastic_endurance.py --framework numpy --losses 500 --minutes 20
    python benchmarks/elastic_endurance.py --losses 60 --minutes 5 --json endurance.json --plot endurance.png

Ranks train a small network with PyTorch on this machine, or fit a line with NumPy alone: then a new rank is there in a
fraction of a second, and losses can follow one another closely. At random moments one or two of them are killed, and replaced
after a second; and the discovery script names another number of slots, so that ranks are added or leave in good order. One
rank is spared, to see whether it grows; after half of the losses another one is. The program fails unless

    the job ends with exit code 0, and no process of it is left
    memory, descriptors, threads and child processes of the launcher, and of the ranks that are spared, do not grow
    in each tenth of the time the loss is lower than in the one before
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import machine
import psutil

WORKERS = {
    "numpy": Path(__file__).with_name("elastic_endurance_numpy.py"),
    "torch": Path(__file__).with_name("elastic_endurance_worker.py"),
}
SLOTS = [3, 4, 5]
SECONDS_BETWEEN_SLOTS = 8.0
BEGINNING_SECONDS, ENDING_SECONDS = 10.0, 60.0
LOOKING_SECONDS = 0.05
"""Between two looks at the job: short beside the seconds between two disturbances, and long beside what a look costs."""
SETTLING_SECONDS = 2.0
"""After the launcher has ended: what it has ended with itself takes a moment to be gone, and has not been left behind."""
TAG = "ELASTIC_ENDURANCE"
TENTHS = 10
FEWEST_SAMPLES = 30
GROWTH = {"megabytes": 5, "descriptors": 8, "threads": 2, "children": 0}
"""How much more of each a process may have in the last third of its samples than in the second, by the medians. The
launcher has some descriptors for each rank, whose number varies."""


class Sample(NamedTuple):
    """What one process has at one moment.

    Attributes:
        who: "launcher" or "rank", with its number in the system.
        megabytes: of memory that it shares with nobody.
        children: its processes that are no ranks.
    """

    who: str
    megabytes: float
    descriptors: int
    threads: int
    children: int


class Disturbances:
    """Kills ranks and changes slots, and looks at what the processes have."""

    def __init__(
        self, folder: Path, worker: Path, launcher: int, losses: int, seconds: float, chance: random.Random
    ) -> None:
        self.samples: list[Sample] = []
        self.killed: list[float] = []
        self._folder = folder
        self._worker = worker
        self._launcher = launcher
        self._losses = losses
        self._between = 0.9 * seconds / losses
        self._chance = chance
        self._spared = 0
        self._turned = False
        now = time.monotonic()
        self._next_sample, self._next_loss = now, now + BEGINNING_SECONDS
        self._next_slots = now + BEGINNING_SECONDS

    def act(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        members = self._members()
        self._spare(members)
        if now > self._next_sample:
            self._next_sample = now + 1.0
            self._sample("launcher", self._launcher)
            if self._spared:
                self._sample("rank", self._spared)
        if now > self._next_slots:
            self._next_slots = now + self._chance.expovariate(1 / SECONDS_BETWEEN_SLOTS)
            (self._folder / "new").write_text(f"localhost:{self._chance.choice(SLOTS)}\n")
            (self._folder / "new").rename(self._folder / "hosts")
        may_go = sorted(members - {self._spared})
        if now > self._next_loss and len(members) > 1 and self._spared in members:
            self._next_loss = now + self._chance.expovariate(1 / self._between)
            number = min(self._chance.choice([1, 1, 1, 2]), len(may_go), self._losses - len(self.killed))
            for pid in self._chance.sample(may_go, number):
                with contextlib.suppress(ProcessLookupError):  # it has just left with its slot
                    os.kill(pid, signal.SIGKILL)
                    self.killed.append(now)

    def _members(self) -> set[int]:
        """The processes that train in the round that began last."""
        rounds: dict[int, set[int]] = defaultdict(set)
        for path in self._folder.glob("member.*"):
            pid = int(path.suffix[1:])
            if is_worker(pid, self._worker):
                rounds[int(path.read_text() or 0)].add(pid)
            else:
                path.unlink()
        return rounds[max(rounds)] if rounds else set()

    def _spare(self, members: set[int]) -> None:
        """Choose whom to spare. One of those that train is always left, since they alone have the state of the job."""
        if self._spared not in members and not is_worker(self._spared, self._worker):
            self._spared = min(members, default=0)
        elif not self._turned and len(self.killed) >= self._losses / 2 and len(members) > 1:
            self._turned = True
            self._spared = min(members - {self._spared})

    def _sample(self, who: str, pid: int) -> None:
        try:
            process = psutil.Process(pid)
            children = [each for each in process.children(recursive=True) if str(self._worker) not in each.cmdline()]
            with process.oneshot():
                megabytes = process.memory_full_info().uss / 1e6
                found = Sample(f"{who} {pid}", megabytes, process.num_fds(), process.num_threads(), len(children))
            self.samples.append(found)
        except psutil.Error:
            pass  # it, or a child, has just ended; one that is spared may leave with its slot


def main() -> None:
    options = parse_arguments()
    description = machine.describe()
    with tempfile.TemporaryDirectory(prefix="endurance-") as folder:
        worker, chance = WORKERS[options.framework], random.Random(options.seed)
        record = endure(Path(folder), worker, options.losses, options.minutes * 60, chance)
    record = {"machine": description, **record}
    if options.json:
        options.json.write_text(json.dumps(record))
    if options.plot:
        plot(record, options.plot)
    print(machine.in_words(description))
    problems = judge(record)
    print("\n".join(problems) or "nothing has accumulated, and the loss went down throughout")
    sys.exit(bool(problems))


def endure(folder: Path, worker: Path, losses: int, seconds: float, chance: random.Random) -> dict[str, Any]:
    """Run the job. The record: how it ended, its log, losses and samples."""
    (folder / "hosts").write_text(f"localhost:{SLOTS[1]}\n")
    command = [
        sys.executable, "-m", "horovod.runner.launch", "--host-discovery-script", f"cat {folder}/hosts", "--min-np", "1",
        "--blacklist-cooldown-range", "1", "1", sys.executable, str(worker), str(folder),
    ]  # fmt: skip
    began = time.monotonic()
    with (folder / "stderr").open("w") as errors:
        launcher = subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", TAG: folder.name},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
    disturbances = Disturbances(folder, worker, launcher.pid, losses, seconds, chance)
    try:
        while launcher.poll() is None and time.monotonic() < began + seconds and len(disturbances.killed) < losses:
            time.sleep(LOOKING_SECONDS)
            disturbances.act()
        (folder / "end").touch()
        status: int | None = launcher.wait(ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        launcher.kill()
        launcher.wait()
    time.sleep(SETTLING_SECONDS)
    text = (folder / "stderr").read_text()
    return {
        "status": status,
        "left": living(folder.name),
        "last_words": text[-3000:],
        "losses": [at - began for at in disturbances.killed],
        "log": [
            {**entry, "at": entry["at"] - began} for entry in map(json.loads, (folder / "log").read_text().splitlines())
        ],
        "samples": [each._asdict() for each in disturbances.samples],
    }


def is_worker(pid: int, worker: Path) -> bool:
    """Whether a process still is a rank: numbers of processes are used again."""
    try:
        return str(worker) in psutil.Process(pid).cmdline()
    except psutil.Error:
        return False


def living(tag: str) -> list[str]:
    """The command lines of the job's processes that have not ended."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(TAG) == tag and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            pass
    return found


def judge(record: dict[str, Any]) -> list[str]:
    """Print what the job has been through; what is wrong with it, in words."""
    log, samples = record["log"], record["samples"]
    problems = []
    if record["status"] != 0 or record["left"]:
        problems.append(f"exit code {record['status']}, left behind: {record['left']}\n{record['last_words']}")
    rounds, sizes = log[-1]["round"], [entry["size"] for entry in log]
    print(
        f"{log[-1]['at'] / 60:.1f} minutes, {len(record['losses'])} losses, {rounds} rounds, {log[-1]['step']} steps, "
        f"{min(sizes)} to {max(sizes)} ranks"
    )
    if len(log) < TENTHS:
        return [*problems, f"too few lines in the log to judge the loss: {len(log)}; more --minutes help"]
    tenths = [statistics.fmean(entry["loss"] for entry in part) for part in split(log, TENTHS)]
    print("loss by tenths of the time:", " ".join(f"{loss:.4g}" for loss in tenths))
    if any(later >= earlier for earlier, later in itertools.pairwise(tenths)):
        problems.append("the loss does not go down throughout")
    for who in dict.fromkeys(each["who"] for each in samples):
        own = [each for each in samples if each["who"] == who]
        if len(own) < FEWEST_SAMPLES:
            continue
        print(f"{who}, {len(own)} s, medians of its second and last third:")
        _, second, last = split(own, 3)
        for what, most in GROWTH.items():
            before, after = (statistics.median(each[what] for each in part) for part in (second, last))
            print(f"    {what:12} {before:8.1f} {after:8.1f}")
            if after > before + most:
                problems.append(f"{who} has more {what}: {before:.1f}, then {after:.1f}")
    return problems


def split(items: list[Any], parts: int) -> list[list[Any]]:
    return [items[len(items) * part // parts : len(items) * (part + 1) // parts] for part in range(parts)]


def plot(record: dict[str, Any], path: Path) -> None:
    """Loss of the model and size of the job over time."""
    import matplotlib

    matplotlib.use("Agg")  # a file, never a window
    import matplotlib.pyplot as plt

    log = record["log"]
    minutes = [entry["at"] / 60 for entry in log]
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(8.0, 4.2), dpi=150, sharex=True, gridspec_kw={"height_ratios": [3, 2]}
    )
    above.plot(minutes, [entry["loss"] for entry in log], color="#2b6cb0", linewidth=1)
    above.set_yscale("log")
    above.set_ylabel("loss")
    below.step(minutes, [entry["size"] for entry in log], where="post", color="#2b6cb0", linewidth=1)
    losses = [at / 60 for at in record["losses"]]
    below.plot(losses, [0.3] * len(losses), "|", color="#c0392b", markersize=7, label="a rank is killed")
    below.set_ylim(0, max(SLOTS) + 0.9)
    below.set_yticks(range(max(SLOTS) + 1))
    below.set_ylabel("ranks")
    below.set_xlabel("minutes")
    below.legend(loc="upper right", frameon=False, fontsize=8, borderaxespad=0)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--framework", choices=sorted(WORKERS), default="torch", help="of the ranks (default: torch)")
    parser.add_argument("--losses", type=int, default=60, help="how many ranks are killed (default: 60)")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long it takes (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="of what happens when")
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--plot", type=Path, metavar="PATH")
    options = parser.parse_args()
    if options.losses < 1 or options.minutes <= 0:
        parser.error("--losses and --minutes must be positive")
    return options


if __name__ == "__main__":
    main()
