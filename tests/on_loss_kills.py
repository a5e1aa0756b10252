"""Jobs with ``--on-loss continue`` whose ranks are lost one after another at random moments: each must go on, and be right.

    python tests/on_loss_kills.py --runs 100 --seed 1
    python tests/on_loss_kills.py --runs 100 --any      the same with --on-loss continue-any
    python tests/on_loss_kills.py --runs 100 --hosts 2  the same with ranks on two hosts, which are lost, too

Ranks are killed, crash, raise an exception, or are stopped for good. Hosts are agents on this machine, which a stand-in for
ssh starts, each in a namespace of processes of its own. One is lost when its agent is killed, and all processes there with
it. All survivors must hand out the same results of the same ranks, have parameters that are equal to the bit, and losses and
parameters that one process computes from the same data (:func:`on_loss_rank.judge`). Rank 0 is lost under ``continue-any``
only: otherwise the job would end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from shlex import quote

sys.path.append(str(Path(__file__).parent))

import elastic_events
import horovod
import on_loss_rank
from launcher.harness import Launcher
from on_loss_rank import Seen
from time_limits import JOB

TIMEOUT_SECONDS = 2
"""After so long the others give up a rank that is stopped."""
HOW = ["kill", "kill", "kill", "crash", "raise", "stop"]
SIGNALS = {"kill": signal.SIGKILL, "crash": signal.SIGSEGV, "stop": signal.SIGSTOP}
STEPS_BETWEEN = 6
"""About so many steps are between two losses."""


class KillsError(Exception):
    """A job has not come through; the text says what happened before."""


class Kills:
    """One job.

    Args:
        folder: an empty one.
        path: where ranks find the back end's entry points.
        seed: of what happens.
        hosts: how many there are; 1: the launcher's own.
        spares_first: whether rank 0 is never lost.
    """

    def __init__(
        self,
        folder: Path,
        path: str,
        seed: int,
        ranks: int = 4,
        hosts: int = 1,
        *,
        stops: bool = True,
        spares_first: bool = True,
    ) -> None:
        self._folder = folder
        self._path = path
        self._ranks = ranks
        self._hosts = hosts
        self._spares_first = spares_first
        self._chance = random.Random(seed)
        self._hows = [how for how in HOW if stops or how != "stop"]
        self._launcher = Launcher(folder)
        self.happened: list[str] = []
        self.longest: list[tuple[str, float]] = []

    def run(self) -> None:
        """Play it. Raises :class:`KillsError`."""
        strikes = self._strikes()
        lost = [rank for _, ranks in strikes for rank in ranks]
        steps = STEPS_BETWEEN * (len(strikes) + 4)
        process = self._start(steps)
        try:
            members = self._members(process)
            at = 0
            for number, (how, ranks) in enumerate(strikes):
                at = max(at, number * STEPS_BETWEEN + self._chance.randint(1, STEPS_BETWEEN))
                self._await(process, lambda at=at: self._progress() >= at)
                time.sleep(self._chance.random() * 0.03)  # anywhere in the next steps
                self._strike(how, ranks, members[ranks[0]])
            out, errors = process.communicate(timeout=JOB)
            self._judge(process.returncode, out + errors, sorted({*range(self._ranks)} - {*lost}))
        finally:
            for pid in self._launcher.living():
                os.kill(pid, signal.SIGKILL)
            process.communicate(timeout=JOB)

    def _strikes(self) -> list[tuple[str, list[int]]]:
        """What happens, one thing after another, each with the ranks that are lost by it. At least one rank is left."""
        found: list[tuple[str, list[int]]] = []
        left = list(range(self._ranks))
        for rank in self._chance.sample(
            range(self._spares_first, self._ranks), self._chance.randint(1, self._ranks - 1)
        ):
            if rank not in left or len(left) == 1:
                continue
            how, ranks = self._chance.choice(self._hows), [rank]
            beside = [each for each in left if self._host_of(each) == self._host_of(rank)]
            spared = len(beside) < len(left) and not (self._spares_first and 0 in beside)
            if self._hosts > 1 and spared and self._chance.random() < 0.5:
                how, ranks = "host", beside
            found.append((how, ranks))
            left = [each for each in left if each not in ranks]
        return found

    def _host_of(self, rank: int) -> int:
        return rank * self._hosts // self._ranks

    def _start(self, steps: int) -> object:
        program = Path(on_loss_rank.__file__)
        ours = [str(Path(horovod.__file__).parents[1]), self._path, str(program.parent)]
        where = ["-np", str(self._ranks)]
        if self._hosts > 1:
            slots = Counter(map(self._host_of, range(self._ranks)))
            where = ["-H", ",".join(f"host{host}:{count}" for host, count in slots.items())]
        shell = self._folder / "shell"
        shell.write_text(elastic_events.SHELL)
        shell.chmod(0o755)
        return self._launcher.start(
            *where, "--min-np", "1", "--torch-backend", "horovod", "--on-loss",
            "continue" if self._spares_first else "continue-any",
            "--gloo-timeout-seconds", str(TIMEOUT_SECONDS), "--start-timeout", "120",
            "python", str(program), str(self._folder), str(steps),
            PYTHONPATH=os.pathsep.join(filter(None, ours)), HOROVOD_SSH_COMMAND=quote(str(shell)),
        )  # fmt: skip

    def _progress(self) -> int:
        path = self._folder / "progress"
        return int(path.read_text()) if path.exists() else 0

    def _await(self, process, ready) -> None:
        deadline = time.monotonic() + JOB
        while not ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise KillsError(self._text("the job does not go on", "".join(process.communicate(timeout=JOB))))
            time.sleep(0.001)  # less than a step

    def _members(self, process) -> dict[int, elastic_events.Member]:
        """The processes of the ranks, by the number that each has first. Looking for them takes as long as many steps."""
        files = [self._folder / f"pid.{rank}" for rank in range(self._ranks)]
        self._await(process, lambda: all(file.exists() for file in files))
        found = [elastic_events.member(*each, on_loss_rank.__name__) for each in self._launcher.living().items()]
        return {each.number: each for each in found if each is not None}

    def _strike(self, how: str, ranks: list[int], first: elastic_events.Member) -> None:
        self.happened.append(f"{how} rank{'s' if len(ranks) > 1 else ''} {ranks} at step {self._progress()}")
        if how == "raise":
            on_loss_rank.write(self._folder / f"raise.{ranks[0]}", "")
            return
        os.kill(first.agent if how == "host" else first.pid, SIGNALS.get(how, signal.SIGKILL))

    def _judge(self, status: int, said: str, survivors: list[int]) -> None:
        if status:
            raise KillsError(self._text(f"the job ended with {status}", said))
        found = {int(path.suffix[1:]): Seen(*json.loads(path.read_text())) for path in self._folder.glob("result.*")}
        if sorted(found) != survivors:
            raise KillsError(self._text(f"results of {sorted(found)}, survivors {survivors}", said))
        wrong = on_loss_rank.judge([*found.values()])
        if wrong:
            raise KillsError(self._text(wrong, said))
        seen = found[survivors[0]]
        for step, (before, after) in enumerate(zip(seen.ranks, [*seen.ranks[1:], seen.sums[-1]], strict=True)):
            if before != after:
                self.longest.append((str(step), seen.seconds[step]))

    def _text(self, what: str, said: str) -> str:
        return "\n".join([what, *self.happened, said])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run after so many seconds")
    parser.add_argument("--no-stops", action="store_true")
    parser.add_argument("--any", action="store_true", help="lose rank 0, too")
    options = parser.parse_args()
    began, counts, failed = time.monotonic(), Counter(), 0
    for seed in range(options.seed, options.seed + options.runs):
        if time.monotonic() - began > options.seconds:
            break
        with tempfile.TemporaryDirectory() as folder:
            kills = Kills(
                Path(folder),
                "",
                seed,
                options.ranks,
                options.hosts,
                stops=not options.no_stops,
                spares_first=not options.any,
            )
            try:
                kills.run()
            except KillsError as error:
                failed += 1
                print(f"seed {seed}: {error}", flush=True)
            counts.update(each.split()[0] for each in kills.happened)
            counts["runs"] += 1
            print(f"seed {seed}: {', '.join(kills.happened)}; {[round(s, 3) for _, s in kills.longest]}", flush=True)
    print(f"{dict(counts)}; failed: {failed}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
