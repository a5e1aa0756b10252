"""A process joins a running job: it meets the others in ``hvd.elastic.run``, whatever its script calls before.

:data:`launcher.elastic_arrivals.WAYS` is the table of all states of all frameworks.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from shlex import quote

import pytest

import horovod
from launcher import elastic_arrivals
from launcher.elastic_arrivals import WAYS
from launcher.harness import RUN_SECONDS, Launcher
from part import some

NEEDS = {
    "plain": "numpy",
    "torch": "torch",
    "tensorflow": "tensorflow",
    "tf_keras": "tf_keras",
    "keras on torch": "keras",
    "keras on jax": "jax",
}


@pytest.mark.parametrize("way", some(list(WAYS), ["plain", "torch", "tensorflow"]))
def test_a_process_that_joins_takes_over_every_state(launcher: Launcher, tmp_path: Path, way: str) -> None:
    if importlib.util.find_spec(NEEDS[way]) is None:
        pytest.skip(f"{NEEDS[way]} is not installed")
    (tmp_path / "hosts").write_text("localhost:2\n")
    settings = {**WAYS[way][0], "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    process = launcher.start(
        "--host-discovery-script", f"cat {quote(str(tmp_path / 'hosts'))}", "-np", "2", "--min-np", "2",
        "--start-timeout", "600", "python", elastic_arrivals.__file__, tmp_path, way, **settings,
    )  # fmt: skip
    _, errors = process.communicate(timeout=4 * RUN_SECONDS)
    assert process.returncode == 0, errors
    results = {path.suffix: json.loads(path.read_text()) for path in tmp_path.glob("result.*")}
    assert set(results) == {".0", ".1", ".2"}, errors
    new = -1.0 - 2
    for name, (size, step, first, began, final) in results.items():
        assert size == 3
        flat = [[value for state in states for value in state] for states in (first, began, final)]
        assert set(flat[0]) == ({new} if name == ".2" else {-1.0}), "before hvd.elastic.run"
        assert len(set(flat[1])) == 1 and flat[1][0] > 0, "at the beginning of its last round"
        assert set(flat[2]) == {step}
    assert len({step for _, step, *_ in results.values()}) == 1
    warned = errors.count("is called before hvd.elastic.run")
    assert warned == (way in ("torch", "tensorflow")), "only of what the script calls itself"


def test_the_table_has_every_state() -> None:
    """By the source: the classes below ``State`` that are not the base of another one."""
    root = Path(horovod.__file__).parent
    bases: dict[str, tuple[str, list[str]]] = {}
    for path in root.rglob("*.py"):
        module = ".".join(["horovod", *path.relative_to(root).with_suffix("").parts]).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                names = [
                    base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in node.bases
                ]
                bases[f"{module}.{node.name}"] = (node.name, names)
    states = {"State"}
    while len(more := states | {name for name, names in bases.values() if states & set(names)}) > len(states):
        states = more
    bases_of_others = {base for name, names in bases.values() if name in states for base in names}
    found = {path for path, (name, _) in bases.items() if name in states - bases_of_others}
    assert found | {"horovod.elastic.state.ObjectState"} == {name for _, table in WAYS.values() for name in table}


CALLS = """
import os, sys, time
from pathlib import Path
from horovod.common import basics
from horovod.common.elastic import ObjectState, Reset, run_fn
from horovod._bindings.objects import allgather_object, broadcast_object

folder = Path(sys.argv[1])
basics.init()
if os.environ["HOROVOD_ELASTIC_PROCESS"] == "2" and sys.argv[2] == "exits":
    sys.exit(0)
settings = broadcast_object({"steps": 20} if basics.rank() == 0 else None)
if os.environ["HOROVOD_ELASTIC_PROCESS"] == "2":
    raise AssertionError("it has got an object that nobody has sent")

def train(state):
    went = False
    while state.step < settings["steps"] or not went:
        if basics.rank() == 0 and state.step == 2:
            (folder / "hosts").write_text("localhost:3\\n")
        went = went or all(allgather_object(int(os.environ["HOROVOD_ELASTIC_ROUND"]) >= 3))
        state.step += 1
        time.sleep(0.01)  # the process that joins needs the processor for its imports
        state.commit()

run_fn(train, Reset(basics.shutdown, basics.init))(ObjectState(broadcast_object, basics.rank, step=0))
print("END", basics.size(), flush=True)
"""
LINE = 1 + CALLS[: CALLS.index("settings = ")].count("\n")


@pytest.mark.parametrize("how", ["calls", "exits"])
def test_a_process_that_joins_and_does_not_come_to_the_others_ends_alone(
    launcher: Launcher, tmp_path: Path, how: str
) -> None:
    """Another collective than a broadcast of parameters raises, with the line."""
    (tmp_path / "hosts").write_text("localhost:2\n")
    (tmp_path / "train.py").write_text(CALLS)
    ended = launcher.run(
        "--host-discovery-script", f"cat {quote(str(tmp_path / 'hosts'))}", "-np", "2", "--min-np", "2",
        "--start-timeout", "600", "python", "train.py", tmp_path, how,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("END 2") == 2
    line = f"broadcast at {tmp_path}/train.py:{LINE}"
    assert ended.stderr.count(f"{line} is called before hvd.elastic.run.") == 1
    if how == "calls":
        assert f"[2]<stderr>:RuntimeError: {line}: no other rank takes part." in ended.stderr
        assert "Process 2 (rank 2, on localhost) exit with status code 1. No new processes" in ended.stderr
    else:
        assert "Process 2 (rank 2, on localhost) ended with exit code 0 before it reached hvd.elastic" in ended.stderr


GROUPS = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import horovod.torch as hvd
from horovod.common.elastic import ObjectState

folder = Path(sys.argv[1])

def make_group(name, rank, size):
    dist.init_process_group("horovod", store=dist.FileStore(str(folder / name), size), rank=rank, world_size=size)

hvd.init()
make_group("first", hvd.rank(), hvd.size())
dist.new_group(list(range(hvd.size())))
dist.destroy_process_group()

def train(state):
    make_group(f"in round {os.environ['HOROVOD_ELASTIC_ROUND']}", hvd.rank(), hvd.size())
    try:
        went = False
        while state.step < 20 or not went:
            if hvd.rank() == 0 and state.step == 2:
                (folder / "hosts").write_text("localhost:3\\n")
            rounds = torch.tensor([int(os.environ["HOROVOD_ELASTIC_ROUND"])])
            dist.all_reduce(rounds, dist.ReduceOp.MIN)
            went = went or int(rounds) >= 3
            state.step += 1
            time.sleep(0.01)  # as above
            state.commit()
    finally:
        dist.destroy_process_group()

hvd.elastic.run(train)(ObjectState(hvd.broadcast_object, hvd.rank, step=0))
print("END", hvd.size(), flush=True)
"""
LINE_OF_GROUP = 1 + GROUPS[: GROUPS.index("dist.new_group")].count("\n")


def test_a_process_that_joins_makes_no_group_of_some_ranks_before_it_comes_to_the_others(
    launcher: Launcher, tmp_path: Path
) -> None:
    """The default group may be made, and groups that the training function makes in each round work."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    (tmp_path / "hosts").write_text("localhost:2\n")
    (tmp_path / "train.py").write_text(GROUPS)
    ended = launcher.run(
        "--host-discovery-script", f"cat {quote(str(tmp_path / 'hosts'))}", "-np", "2", "--min-np", "2",
        "--start-timeout", "600", "python", "train.py", tmp_path,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("END 2") == 2
    line = f"torch.distributed.new_group() at {tmp_path}/train.py:{LINE_OF_GROUP}"
    assert ended.stderr.count(f"{line} is called before hvd.elastic.run.") == 1
    assert f"[2]<stderr>:[rank2]: RuntimeError: {line}: no other rank takes part." in ended.stderr


def test_a_job_that_is_not_elastic_is_not_warned(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import horovod.common.basics as b\nfrom horovod._bindings.objects import broadcast_object\nb.init()\n"
        "broadcast_object(1)\n"
    )
    ended = launcher.run("-np", "2", "python", "train.py")
    assert (ended.returncode, ended.stderr) == (0, "")
