"""Hundreds of rounds of one elastic job, for real: neither its launcher nor its ranks have more in the end than early on."""

from __future__ import annotations

import json
from pathlib import Path

from launcher.harness import RUN_SECONDS, Launcher

ROUNDS, FIRST_LOOK = 300, 100
MOST_MEGABYTES = 1.5
"""What allocators may take meanwhile. To keep 8 KB a round would be more."""

# Each round ends as after a failed collective, whereupon all meet again. What there is, is looked at where all are still.
SCRIPT = """
import gc, json, os, sys, threading
from pathlib import Path
import psutil
from horovod.common import basics
from horovod.common.elastic import ObjectState, Reset, run_fn
from horovod._bindings.objects import allgather_object, broadcast_object
from horovod.core.errors import HorovodInternalError

folder, rounds, looks = Path(sys.argv[1]), int(sys.argv[2]), list(map(int, sys.argv[2:]))
basics.init()
state = ObjectState(broadcast_object, basics.rank, step=0)
found = []

def look():
    gc.collect()
    own, launcher = psutil.Process(), psutil.Process().parent()
    for process in (own, launcher):
        found.append([
            process.num_fds(), process.num_threads(), len(process.children(recursive=True)),
            process.memory_full_info().uss / 1e6,
        ])
    found[-2].append(len(gc.get_objects()))

def train(state):
    state.step += 1
    assert len(allgather_object(state.step)) == basics.size() == 2
    state.commit()
    if state.step in looks:
        look()
        allgather_object(None)
    if state.step < rounds:
        raise HorovodInternalError("Once more.")

run_fn(train, Reset(basics.shutdown, basics.init))(state)
(folder / f"found.{basics.rank()}").write_text(json.dumps(found))
"""


def test_nothing_accumulates_over_hundreds_of_rounds(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    process = launcher.start(
        "-H", "localhost:2", "--min-np", "2", "python", "train.py", tmp_path, ROUNDS, FIRST_LOOK
    )  # fmt: skip
    _, errors = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 0, errors
    assert f"round {ROUNDS} begins with 2 ranks" in errors
    for rank in range(2):
        early, early_launcher, late, late_launcher = json.loads((tmp_path / f"found.{rank}").read_text())
        assert late[:3] == early[:3], "descriptors, threads, children"
        assert late_launcher[:3] == early_launcher[:3]
        assert late[3] - early[3] < MOST_MEGABYTES and late_launcher[3] - early_launcher[3] < MOST_MEGABYTES
        assert late[4] - early[4] < ROUNDS - FIRST_LOOK, "objects: not one for each round"
