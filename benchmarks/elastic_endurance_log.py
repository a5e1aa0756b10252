"""The files in which ranks of ``benchmarks/elastic_endurance.py`` tell it what they do, whatever they train with.

In the folder of the job are

    member.PID    the round that this process trains in, so that only such a process is killed
    log           one line of JSON for each quarter of a second, written by rank 0
    end           is there when the job is to end
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from horovod.common import basics

LOG_SECONDS = 0.25
"""How often a line is written: seldom enough to cost nothing, often enough for rounds that last a second."""
PAUSE_SECONDS = 0.01
"""After each step, so that processes that start get some of the machine."""
BEGINNING: dict[str, Any] = {"step": 0, "over": False, "logged": 0.0, "losses": ()}
"""What the elastic state of a rank has beside its model: the steps of the job, whether it is over, when the last line was
written, and the losses of the steps since then."""


class RankLog:
    """The files of one rank.

    Args:
        folder: of the job.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin_round(self) -> None:
        """Say that this process trains. Called when the training function is."""
        path = self._folder / f"member.{os.getpid()}"
        new = path.with_name(f".{path.name}")
        new.write_text(os.environ["HOROVOD_ELASTIC_ROUND"])
        new.rename(path)  # all at once, for who reads it meanwhile

    def is_to_end(self) -> bool:
        """Whether this rank knows that the job is to end. Only rank 0 looks: all ranks must end after the same step."""
        return basics.rank() == 0 and (self._folder / "end").exists()

    def end_step(self, state: Any, loss: float) -> None:
        """Count a step in the state, and write a line if one is due. Called on every rank.

        Args:
            state: has the attributes of :data:`BEGINNING`.
            loss: of all ranks.
        """
        state.step += 1
        state.losses = (*state.losses, loss)
        now = time.monotonic()
        if now > state.logged + LOG_SECONDS:
            if basics.rank() == 0:
                self._write(now, state)
            state.losses, state.logged = (), now

    def _write(self, now: float, state: Any) -> None:
        entry = {
            "at": now,
            "step": state.step,
            "loss": sum(state.losses) / len(state.losses),
            "size": basics.size(),
            "round": int(os.environ["HOROVOD_ELASTIC_ROUND"]),
        }
        with (self._folder / "log").open("a") as file:
            file.write(json.dumps(entry) + "\n")
