"""Elastic jobs whose processes end with exit code 0 before the job has finished."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

import pytest

from launcher.harness import Launcher
from ranks import SOURCE, TESTS

SCRIPT = """
import os, sys, time
from pathlib import Path
from horovod.common import basics
from horovod.common.elastic import ObjectState, Reset, run_fn
from horovod._bindings.objects import allgather_object, broadcast_object

how, hosts = sys.argv[1], Path(sys.argv[2])
if how == "new" and os.environ["HOROVOD_ELASTIC_PROCESS"] == "2":
    (hosts.parent / "came.new").write_text(str(os.getpid()))
    (hosts.parent / "came.new").rename(hosts.parent / "came")
    sys.exit(0)
basics.init()

def is_over(state):
    if how != "new":
        return state.step == 12
    came = hosts.parent / "came"
    return came.exists() and not Path("/proc", came.read_text()).exists()  # the launcher knows that it has ended

def train(state):
    over = False
    while not over:
        if state.step == 5 and basics.rank() == 0:
            hosts.write_text("localhost:3\\n")
        if state.step == 10:
            (hosts.parent / f"ten.{basics.rank()}").touch()
        if state.step == 10 and basics.rank() == 1 and how != "new":
            from time_limits import await_file
            for other in (0, 2):  # else they may be in the collective of that commit when this rank ends
                await_file(hosts.parent / f"ten.{other}")
            if how == "return":
                return
            if how == "sys.exit":
                sys.exit(0)
            if how == "os._exit":
                os._exit(0)
        if how == "new":
            time.sleep(0.02)
        over = all(allgather_object(is_over(state)))
        state.step += 1
        state.commit()

run_fn(train, Reset(basics.shutdown, basics.init))(ObjectState(broadcast_object, basics.rank, step=0))
if basics.rank() == 0:
    print("written", flush=True)
"""
LINE = 1 + SCRIPT[: SCRIPT.index("        over = all(")].count("\n")


@pytest.mark.parametrize("how", ["return", "sys.exit", "os._exit"])
def test_a_rank_that_ends_well_while_others_train_fails_the_job(launcher: Launcher, tmp_path: Path, how: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["-H", "localhost:3", "--min-np", "1", "python", "train.py", how, str(tmp_path / "hosts")]
    ended = launcher.run(*words, PYTHONPATH=f"{SOURCE}:{TESTS}")
    assert ended.returncode == 1 and "written" not in ended.stdout
    returned = "returned from the training function after 10 commits and " if how == "return" else ""
    first = f"Process 1 (rank 1, on localhost) {returned}ended with exit code 0"
    assert f"horovodrun: the job ended: {first} before 2 other ranks had finished:\n" in ended.stderr
    for rank in (0, 2):
        assert f"\n  rank {rank} waited at {tmp_path}/train.py:{LINE}: " in ended.stderr
    reason = f"NoNextRound: The job ends: {first}, so no further round begins. "
    assert ended.stderr.count(reason) + ended.stderr.count("The same traceback as ") == 2


def test_a_process_that_joins_and_ends_well_before_init_does_not_end_the_job(
    launcher: Launcher, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "hosts").write_text("localhost:2\n")
    script = f"cat {quote(str(tmp_path / 'hosts'))}"
    ended = launcher.run(
        "--host-discovery-script", script, "--min-np", "1", "python", "train.py", "new", str(tmp_path / "hosts")
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "written" in ended.stdout
    assert "Process 2 (on localhost) ended with exit code 0 before it called hvd.init()" in ended.stderr
    assert "round 2" not in ended.stderr
