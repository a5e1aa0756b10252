"""DistributedDataParallel in an elastic job: the default group, the model and the optimizer stay the same objects."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from shlex import quote

import pytest

import elastic_ddp_rank
import elastic_events
import horovod
from launcher.harness import Launcher
from part import some
from torch_versions import needs_torch

pytestmark = needs_torch("2.6", "C++ code that asks a group in Python for its size")

EVENTS = 4
LEAST = ["--min-np", "2", "--start-timeout", "600"]

# Ranks end where the plan says so; everything else is that of elastic_ddp_rank.py.
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from elastic_ddp_rank import loss_of, made, values_of
import horovod.torch as hvd

torch.set_num_threads(1)
folder, number, born = Path(sys.argv[1]), os.environ["HOROVOD_ELASTIC_PROCESS"], os.getpid()
plan = json.loads((folder / "plan.json").read_text())
dist.init_process_group("horovod")
model, optimizer = made()
ddp = DistributedDataParallel(model, bucket_cap_mb=0.002, **plan.get("ddp", {}))
if plan.get("hook"):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
state = hvd.elastic.TorchState(ddp, optimizer, rollback=plan.get("rollback", "commit"), step=0, runs=[])
group, sizes = dist.group.WORLD, []

def strike(*_):
    if plan.get("kill", {}).get(number) == state.step:
        os.kill(born, signal.SIGKILL)

model[2].register_full_backward_hook(strike)

@hvd.elastic.run
def train(state):
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.group.WORLD is group is ddp.process_group
    sizes.append(size)
    pairs = [dist.new_group([first, first + 1]) for first in range(0, size - 1, 2)]
    mine = pairs[rank // 2] if rank // 2 < len(pairs) else None
    while state.step < plan["steps"] or plan.get("until") not in (None, size):
        if plan.get("hosts", {}).get(str(state.step)) and rank == 0:
            (folder / "hosts").write_text(plan["hosts"][str(state.step)])
        time.sleep(0.02 * ("until" in plan))  # so few steps pass until another process has come
        optimizer.zero_grad()
        loss_of(ddp, state.step, rank).backward()
        optimizer.step()
        total = torch.ones(1)
        if mine is not None:
            dist.all_reduce(total, group=mine)
            assert total.item() == 2
        earlier = state.runs
        before = earlier[-1][1] if earlier and earlier[-1][0] == size else 0
        state.runs = [*earlier[: len(earlier) - bool(before)], (size, before + 1)]
        state.step += 1
        state.commit()
    dist.broadcast(model[4].passes, 0)

train(state)
assert os.getpid() == born
result = [state.step, "", sizes, state.runs, values_of(model)]
(folder / f"result.{number}").write_text(json.dumps(result))
dist.destroy_process_group()
"""


def prepare(folder: Path, **plan: object) -> list[str]:
    (folder / "train.py").write_text(SCRIPT)
    (folder / "plan.json").write_text(json.dumps(plan))
    return ["python", "train.py", str(folder)]


def results(folder: Path) -> dict[int, list[object]]:
    return {int(path.suffix[1:]): json.loads(path.read_text()) for path in folder.glob("result.*")}


def paths(installed: str) -> str:
    """Where ranks find this back end's entry points, and the program of the other tests."""
    ours = [Path(horovod.__file__).parents[1], installed, Path(elastic_ddp_rank.__file__).parent]
    return os.pathsep.join(map(str, ours))


OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "views, last step": {"rollback": "step", "ddp": {"gradient_as_bucket_view": True}},
    "static graph, hook": {"ddp": {"static_graph": True}, "hook": True},
    "unused parameters": {"ddp": {"find_unused_parameters": True}},
}


# A job without options goes on after random events, below.
@pytest.mark.parametrize("options", some(list(OPTIONS), ["views, last step", "static graph, hook"]))
def test_the_model_trains_on_with_the_ranks_that_are_left(
    launcher: Launcher, tmp_path: Path, options: str, installed: str
) -> None:
    command = prepare(tmp_path, steps=15, kill={"2": 4, "0": 9}, **OPTIONS[options])
    ended = launcher.run("-H", "localhost:4", *LEAST, *command, PYTHONPATH=paths(installed))
    assert ended.returncode == 0, ended.stderr
    found = results(tmp_path)
    assert set(found) == {1, 3}
    assert elastic_ddp_rank.judge(list(found.values())) == ""
    lost = r"rank 2 on localhost \(process 2, exit code 137 \(killed by SIGKILL\)\)"
    assert re.search(
        rf"horovodrun: {lost} was lost while the others were in allreduce 'torch\.distributed\S+' at \S+train\.py:\d+; "
        "3 ranks go on",
        ended.stderr,
    )
    last = ended.stderr.splitlines()[-1]
    assert re.search(rf"the job has gone on without: in round 1 {lost}; in round 2 rank 0 on localhost", last), last
    for _, _, sizes, runs, _ in found.values():
        assert (sizes, runs) == ([4, 3, 2], [[4, 4], [3, 5], [2, 6]])


def test_a_process_that_joins_gets_parameters_buffers_buckets_and_momentum(
    launcher: Launcher, tmp_path: Path, installed: str
) -> None:
    (tmp_path / "hosts").write_text("localhost:1\n")
    command = prepare(tmp_path, steps=8, hosts={"4": "localhost:3\n"}, until=3)
    script = f"cat {quote(str(tmp_path / 'hosts'))}"
    ended = launcher.run(
        "--host-discovery-script",
        script,
        "--min-np",
        "1",
        "--start-timeout",
        "600",
        *command,
        PYTHONPATH=paths(installed),
    )
    assert ended.returncode == 0, ended.stderr
    found = results(tmp_path)
    assert set(found) == {0, 1, 2}
    assert elastic_ddp_rank.judge(list(found.values())) == ""


def test_a_job_with_ddp_goes_on_after_random_events_and_has_the_result_of_a_reference(tmp_path: Path) -> None:
    """``python tests/elastic_events.py --program ddp --histories 200`` plays more."""
    if not elastic_events.available():
        pytest.skip("this machine allows no namespaces of processes")
    went = elastic_events.ElasticEvents(tmp_path, seed=3, program="ddp").run(EVENTS)
    assert "the undisturbed result" in went


# Two ranks, then three, then two without process 0: each of them has a part of every epoch's samples.
DISTRIBUTED_SAMPLER = """
import json, os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
import horovod.torch as hvd

folder = Path(sys.argv[1])
dist.init_process_group("horovod")
samples = torch.arange(23.0)

def divide():
    global loader
    loader = DataLoader(samples, batch_size=2, sampler=DistributedSampler(samples))

divide()
model = DistributedDataParallel(torch.nn.Linear(1, 1))
state = hvd.elastic.TorchState(model, torch.optim.SGD(model.parameters(), lr=0.001), epoch=0, sizes=[0])
state.register_reset_callbacks([divide])

@hvd.elastic.run
def train(state):
    rank, size = dist.get_rank(), dist.get_world_size()
    while state.sizes.count(3) < 2 or state.sizes[-1] != 2:
        loader.sampler.set_epoch(state.epoch)
        seen = []
        for batch in loader:
            model(batch[:, None]).sum().backward()
            seen += batch.tolist()
            time.sleep(0.005)  # so few epochs pass until the launcher finds the new slot
            if os.environ["HOROVOD_ELASTIC_PROCESS"] == "0" and state.sizes.count(3) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        (folder / f"epoch.{state.epoch}.{rank}").write_text(json.dumps([size, seen]))
        if (rank, state.epoch) == (0, 1):
            (folder / "hosts").write_text("localhost:3\\n")
        state.epoch, state.sizes = state.epoch + 1, [*state.sizes, size]
        state.commit()

train(state)
dist.destroy_process_group()
"""


def test_a_distributed_sampler_that_a_reset_callback_makes_leaves_no_sample_out(
    launcher: Launcher, tmp_path: Path, installed: str
) -> None:
    (tmp_path / "hosts").write_text("localhost:2\n")
    (tmp_path / "train.py").write_text(DISTRIBUTED_SAMPLER)
    script = ["--host-discovery-script", f"cat {quote(str(tmp_path / 'hosts'))}", "--min-np", "2"]
    command = ["python", "train.py", str(tmp_path)]
    ended = launcher.run(*script, "--start-timeout", "600", *command, PYTHONPATH=paths(installed))
    assert ended.returncode == 0, ended.stderr
    epochs: dict[int, dict[int, tuple[int, list[float]]]] = {}
    for path in tmp_path.glob("epoch.*.*"):
        _, epoch, rank = path.name.split(".")
        epochs.setdefault(int(epoch), {})[int(rank)] = json.loads(path.read_text())
    sizes = []
    for _, parts in sorted(epochs.items()):
        (size,) = {size for size, _ in parts.values()}
        seen = [sample for _, part in parts.values() for sample in part]
        assert sorted(parts) == list(range(size))
        assert set(seen) == set(range(23)) and len(seen) == -(-23 // size) * size
        sizes.append(size)
    assert [size for size, before in zip(sizes, [0, *sizes], strict=False) if size != before] == [2, 3, 2]


EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "torch_ddp_elastic.py"

# A group of the first round is kept, and called in the second.
KEPT_GROUP = """
import os, signal
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import horovod.torch as hvd

dist.init_process_group("horovod")
kept = []

@hvd.elastic.run
def train(state):
    if not kept:
        kept.extend([dist.new_group([0, 1]), init_device_mesh("cpu", (dist.get_world_size(),))])
    dist.barrier()  # every rank has kept them
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1), group=kept[0])

train(hvd.elastic.TorchState(step=0))
"""

LOST_IN_NEW_GROUP = """
import os, signal
import torch
import torch.distributed as dist
import horovod.torch as hvd

dist.init_process_group("horovod")

@hvd.elastic.run
def train(state):
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) == (2, 3):
        os.kill(os.getpid(), signal.SIGKILL)
    group = dist.new_group(list(range(size)))
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    print("total", total.item(), flush=True)

train(hvd.elastic.TorchState(step=0))
"""

# The script is wrong on every rank at the moment when one is lost.
WRONG_SCRIPT = """
import os, signal
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import horovod.torch as hvd

dist.init_process_group("horovod")
model = DistributedDataParallel(torch.nn.Linear(4, 2))

@hvd.elastic.run
def train(state):
    model(torch.ones(1, 4)).sum().backward()
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.group.WORLD.generation.termination.failed.wait(60)
    model.module(torch.ones(1, 5))

train(hvd.elastic.TorchState(model, step=0))
"""


def test_the_example_goes_on_when_rank_0_is_lost(launcher: Launcher, installed: str) -> None:
    pytest.importorskip("sklearn")
    words = ["-np", "3", *LEAST, "python", EXAMPLE, "--lose-a-rank"]
    ended = launcher.run(*words, PYTHONPATH=paths(installed))
    assert ended.returncode == 0, ended.stderr
    said = re.findall(r"epoch (\d): accuracy ([\d.]+) on (\d) ranks", ended.stdout)
    assert [(epoch, size) for epoch, _, size in said] == [("1", "3"), ("2", "2"), ("3", "2"), ("4", "2")]
    assert float(said[-1][1]) > 0.8, ended.stdout


def test_a_group_of_some_ranks_ends_with_its_round_and_says_so(
    launcher: Launcher, tmp_path: Path, installed: str
) -> None:
    (tmp_path / "train.py").write_text(KEPT_GROUP)
    ended = launcher.run("-np", "3", *LEAST, "python", "train.py", PYTHONPATH=paths(installed))
    assert ended.returncode == 1, ended.stderr
    assert "RuntimeError: The process group of ranks [0, 1] ended with an earlier round of this job" in ended.stderr
    assert "DeviceMesh" in ended.stderr and "was made for 3 ranks, and now there are 2" in ended.stderr
    assert "round 3" not in ended.stderr


def test_a_rank_that_is_lost_while_a_group_is_made_does_not_cost_the_others_its_time_limit(
    launcher: Launcher, tmp_path: Path, installed: str
) -> None:
    (tmp_path / "train.py").write_text(LOST_IN_NEW_GROUP)
    ended = launcher.run("-np", "3", *LEAST, "python", "train.py", PYTHONPATH=paths(installed))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("total 2.0") == 2


def test_an_error_of_the_script_stays_one_although_a_rank_was_lost(
    launcher: Launcher, tmp_path: Path, installed: str
) -> None:
    (tmp_path / "train.py").write_text(WRONG_SCRIPT)
    ended = launcher.run("-np", "3", *LEAST, "python", "train.py", PYTHONPATH=paths(installed))
    assert ended.returncode != 0
    assert "RuntimeError: mat1 and mat2 shapes cannot be multiplied" in ended.stderr
    assert "round 2" not in ended.stderr
