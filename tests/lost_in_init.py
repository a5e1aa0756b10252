"""Jobs of which one rank is killed or stopped at a random moment of ``init()``, while the others meet there.

Which rank, how and when follow from a number, so that a job can be repeated. As a program it runs many, and reports those in
which the launcher's last words name another rank: ``python tests/lost_in_init.py --jobs 60``.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.harness import Launcher

SECONDS = 5
"""How long ranks wait for others: longer than they take to start."""
_LATEST_SECONDS = 0.3
"""How much later than others a rank may begin."""

SCRIPT = """
import os, sys, time
from horovod.common import basics
from horovod.core.submission import collectives

rank = int(os.environ["HOROVOD_RANK"])
time.sleep(float(os.environ["BEGINS"].split(",")[rank]))
passed = 0

def count(frame, event, argument):
    global passed
    passed += 1
    if passed == moment:
        os.kill(os.getpid(), int(os.environ["LOST_BY"]))

moment = int(os.environ["MOMENT"])
if rank == int(os.environ["LOST"]):
    sys.setprofile(count)
basics.init()
sys.setprofile(None)
if rank == int(os.environ["LOST"]):
    print("calls of init:", passed, flush=True)
    if passed < moment:
        os.kill(os.getpid(), int(os.environ["LOST_BY"]))
collectives.barrier().wait()
"""
"""A moment is the number of a call, or of its end, in the thread that called ``init()``."""


@dataclass(frozen=True)
class Loss:
    """One job: its size, the rank that it loses, by which signal and when, and when each rank begins."""

    size: int
    rank: int
    by: signal.Signals
    moment: int
    begins: Sequence[float]

    @classmethod
    def of(cls, seed: int, most: int) -> Loss:
        """The job with this number.

        Args:
            most: a number of calls that ``init()`` does not exceed by much.
        """
        choices = random.Random(seed)
        size = choices.randint(2, 4)
        begins = [round(choices.uniform(0, _LATEST_SECONDS), 3) for _ in range(size)]
        by = choices.choice([signal.SIGKILL, signal.SIGSTOP])
        return cls(size, choices.randrange(size), by, choices.randint(1, most), begins)

    def run(self, launcher: Launcher) -> str:
        """Run it to its end. Returns what the launcher and the ranks wrote to standard error; the job must fail."""
        script = launcher.folder / "train.py"
        script.write_text(SCRIPT)
        limits = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(SECONDS), "HOROVOD_START_TIMEOUT": str(SECONDS)}
        lost = {"LOST": str(self.rank), "LOST_BY": str(int(self.by)), "MOMENT": str(self.moment)}
        begins = ",".join(map(str, self.begins))
        found = launcher.run("-np", str(self.size), "python", script, BEGINS=begins, **limits, **lost)
        assert found.returncode, f"the job of {self} has lost no rank: {found.stdout}"
        return found.stderr


def calls_of_init(launcher: Launcher) -> int:
    """How many calls ``init()`` makes in a job of four ranks."""
    script = launcher.folder / "train.py"
    script.write_text(SCRIPT)
    found = launcher.run("-np", "4", "python", script, BEGINS="0,0,0,0", LOST="1", LOST_BY="0", MOMENT="0")
    counted = re.search(r"calls of init: (\d+)", found.stdout)
    assert counted is not None, found.stderr
    return int(counted[1])


def named(errors: str) -> list[int]:
    """The ranks that the launcher's last words name: one."""
    return [int(rank) for rank in re.findall(r"^horovodrun: the job failed\. Rank (\d+) failed first", errors, re.M)]


def lost(errors: str) -> set[int]:
    """The ranks that others say they have lost."""
    said = re.findall(r"lost rank (\d+) while|Horovod: rank (\d+) \(host", errors)
    return {int(in_init or later) for in_init, later in said}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=None, help="the number of the first job")
    options = parser.parse_args()
    first = random.randrange(1 << 30) if options.seed is None else options.seed
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        launcher = Launcher(Path(folder))
        most = calls_of_init(launcher)
        print(f"init() makes {most} calls", flush=True)
        for seed in range(first, first + options.jobs):
            loss = Loss.of(seed, most)
            errors = loss.run(launcher)
            right = named(errors) == [loss.rank] and lost(errors) <= {loss.rank}
            wrong += not right
            print(f"{seed}: {loss}: {'right' if right else 'WRONG'}", flush=True)
            if not right or os.environ.get("SHOW"):
                print(errors, flush=True)
        launcher.await_nothing()
    print(f"{options.jobs - wrong} of {options.jobs} right")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
