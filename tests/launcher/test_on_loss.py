"""``horovodrun --on-loss continue``: a DDP script that knows of no loss goes on with the ranks that are left."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import elastic_events
import horovod
import on_loss_kills
from launcher.harness import Launcher
from part import some
from torch_versions import needs_torch

pytestmark = needs_torch("2.6", "C++ code that asks a group in Python for its size; 2.5: --torch-backend")

GO_ON = ["--torch-backend", "horovod", "--on-loss", "continue"]
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "torch_ddp_survives.py"


def path(installed: str) -> str:
    return os.pathsep.join([str(Path(horovod.__file__).parents[1]), installed])


JOBS = [(5, True, 1), (118, False, 2)]
FURTHER = [(10, False, 1), (6, True, 1), (105, True, 2)]


@pytest.mark.parametrize(("seed", "spares_first", "hosts"), some([*JOBS, *FURTHER], JOBS))
def test_ranks_are_lost_at_random_moments_and_the_others_go_on(
    tmp_path: Path, installed: str, seed: int, spares_first: bool, hosts: int
) -> None:
    if hosts > 1 and not elastic_events.available():
        pytest.skip("this machine allows no namespaces of processes")
    kills = on_loss_kills.Kills(tmp_path, installed, seed, 4, hosts, stops=False, spares_first=spares_first)
    kills.run()
    assert spares_first or any("[0" in each for each in kills.happened), "choose another seed"
    assert hosts == 1 or any("host" in each for each in kills.happened), "choose another seed"


LOSES = """
import os, signal, sys, torch, torch.distributed as dist
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(os.getpid()))  # as Lightning does, in each process
dist.init_process_group("gloo")
first, born, size = dist.get_rank(), os.getpid(), dist.get_world_size()
total = torch.ones(1)
dist.all_reduce(total)
if first == int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(total)
print(f"{first} is {dist.get_rank()} of {dist.get_world_size()}, {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, "
      f"{total.item():g}", flush=True)
old = [torch.zeros(1) for _ in range(size)]
for work in (lambda: dist.broadcast(total, 2), lambda: dist.broadcast(total, 1), lambda: dist.all_gather(old, total)):
    try:
        work()
    except Exception as error:
        print(first, type(error).__name__, error, flush=True)
parts = [torch.zeros(1) for _ in range(dist.get_world_size())]
dist.all_gather(parts, torch.full((1,), float(first)))
print(first, "gathers", [int(each) for each in parts], flush=True)
dist.destroy_process_group()
"""


STOPS = """
import os, signal, torch, torch.distributed as dist
from horovod.comm.shm.completed_calls import CompletedCalls
dist.init_process_group("gloo")
first, publish = dist.get_rank(), CompletedCalls.publish

def stop(self, number):
    if number == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    publish(self, number)

if first == 1:
    CompletedCalls.publish = stop
for _ in range(5):
    total = torch.ones(1)
    dist.all_reduce(total)
print(first, "ends among", int(total), flush=True)
dist.destroy_process_group()
"""


def test_a_rank_that_stops_before_the_others_see_that_it_has_a_result_is_lost(
    launcher: Launcher, tmp_path: Path, installed: str
) -> None:
    (tmp_path / "train.py").write_text(STOPS)
    options = ["--min-np", "2", "--gloo-timeout-seconds", "2"]
    ended = launcher.run("-np", "3", *options, *GO_ON, "python", "train.py", PYTHONPATH=path(installed))
    assert ended.returncode == 0, ended.stderr
    assert "0 ends among 2" in ended.stdout and "2 ends among 2" in ended.stdout


STOPPED_BY_THE_LOST = """
import os, signal, time, torch, torch.distributed as dist
from pathlib import Path
dist.init_process_group("gloo")
rank = dist.get_rank()
Path(f"pid.{rank}").write_text(str(os.getpid()))
dist.all_reduce(torch.ones(1))
if rank == 2:
    os.kill(int(Path("pid.1").read_text()), signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(total := torch.ones(1))
dist.all_reduce(total)
print("ends among", dist.get_world_size(), flush=True)
dist.destroy_process_group()
"""


def test_a_rank_that_is_stopped_while_another_is_lost_does_not_keep_the_others(
    launcher: Launcher, tmp_path: Path, installed: str
) -> None:
    (tmp_path / "train.py").write_text(STOPPED_BY_THE_LOST)
    words = ["-np", "4", "--min-np", "2", *GO_ON, "--gloo-timeout-seconds", "2", "python", "train.py"]
    ended = launcher.run(*words, PYTHONPATH=path(installed))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("ends among 2") == 2, ended.stdout


def test_numbers_change_with_the_first_collective_of_those_that_are_left(
    launcher: Launcher, tmp_path: Path, installed: str
) -> None:
    (tmp_path / "train.py").write_text(LOSES)
    ended = launcher.run("-np", "3", "--min-np", "2", *GO_ON, "python", "train.py", "1", PYTHONPATH=path(installed))
    assert ended.returncode == 0, ended.stderr
    for first, rank in ((0, 0), (2, 1)):
        assert f"{first} is {rank} of 2, {rank} of 2, 6" in ended.stdout
        assert re.search(rf"{first} ArgumentError broadcast: .*2", ended.stdout), "there is no rank 2 any more"
        assert (
            f"{first} ArgumentError all_gather: invalid output tensor list at index 0 (expected length 2, got 3)"
            in ended.stdout
        )
        assert "Rank 1 of 3 was lost before this call: take the number of ranks from" in ended.stdout
        assert re.search(
            rf"{first} ArgumentError broadcast: rank 1 is another process than at the beginning", ended.stdout
        )
        assert f"{first} gathers [0, 2]" in ended.stdout
    assert "rank 1 on localhost (process 1, exit code 137 (killed by SIGKILL)) was lost" in ended.stderr
    assert "2 ranks go on" in ended.stderr
    assert "this script goes on with 2 ranks" in ended.stderr


def test_the_job_ends_with_rank_0(launcher: Launcher, tmp_path: Path, installed: str) -> None:
    (tmp_path / "train.py").write_text(LOSES)
    ended = launcher.run("-np", "2", "--min-np", "1", *GO_ON, "python", "train.py", "0", PYTHONPATH=path(installed))
    assert ended.returncode
    assert "rank 0 was lost, and --on-loss continue cannot go on without it" in ended.stderr


def test_another_rank_takes_the_number_of_rank_0(launcher: Launcher, tmp_path: Path, installed: str) -> None:
    (tmp_path / "train.py").write_text(LOSES)
    options = ["--min-np", "2", *GO_ON[:-1], "continue-any"]
    ended = launcher.run("-np", "3", *options, "python", "train.py", "0", PYTHONPATH=path(installed))
    assert ended.returncode == 0, ended.stderr
    for first, rank in ((1, 0), (2, 1)):
        assert f"{first} is {rank} of 2, {rank} of 2, 6" in ended.stdout
        text = (
            rf"{first} ArgumentError broadcast: rank 1 is another process .* such a number is refused; use a collective"
        )
        assert re.search(text, ended.stdout), ended.stdout
        assert f"{first} gathers [1, 2]" in ended.stdout


ROOTS = """
import os, signal, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
first = dist.get_rank()
net = torch.nn.Sequential(torch.nn.BatchNorm1d(3, momentum=1.0))
m = DDP(net)
for step in range(4):
    if step == 2 and first == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with torch.no_grad():
        m(torch.full((2, 3), 10.0 * step + first))
m.eval()
m._sync_module_buffers(0)
print(first, "has the mean", net[0].running_mean[0].item(), flush=True)
try:
    dist.broadcast(net[0].running_mean, 0)
except Exception as error:
    print(first, type(error).__name__, flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_ddp_takes_buffers_from_the_first_rank_that_is_left(launcher: Launcher, tmp_path: Path, installed: str) -> None:
    (tmp_path / "train.py").write_text(ROOTS)
    options = ["--min-np", "2", *GO_ON[:-1], "continue-any"]
    ended = launcher.run("-np", "3", *options, "python", "train.py", PYTHONPATH=path(installed))
    assert ended.returncode == 0, ended.stderr
    for first in (1, 2):
        assert f"{first} has the mean 31.0" in ended.stdout
        assert f"{first} ArgumentError" in ended.stdout


GATHERS = """
import os, signal, torch, torch.distributed as dist
dist.init_process_group("gloo")
first = dist.get_rank()
parts = [torch.full((1,), -1.0) for _ in range(3)]
if first == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.all_gather(parts, torch.full((1,), float(first)))
except RuntimeError as error:
    print(first, error, [each.item() for each in parts], dist.get_world_size(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_a_gather_that_a_rank_was_lost_in_fails_by_name_and_leaves_its_outputs(
    launcher: Launcher, tmp_path: Path, installed: str
) -> None:
    (tmp_path / "train.py").write_text(GATHERS)
    ended = launcher.run("-np", "3", "--min-np", "2", *GO_ON, "python", "train.py", PYTHONPATH=path(installed))
    assert ended.returncode == 0, ended.stderr
    for first in (0, 2):
        text = rf"{first} all_gather at \S*train\.py:9: rank 1 of 3 was lost, .* \[-1\.0, -1\.0, -1\.0\] 2"
        assert re.search(text, ended.stdout), ended.stdout


OPTIONS = """
import os, signal, hashlib
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
torch.set_num_threads(1)
dist.init_process_group("gloo")
first = dist.get_rank()
out = []
for victim, option in ((4, "gradient_as_bucket_view"), (3, "find_unused_parameters"), (2, "static_graph")):
    torch.manual_seed(1)
    layers = [torch.nn.Linear(20, 50), torch.nn.BatchNorm1d(50), torch.nn.Tanh(), torch.nn.Linear(50, 3)]
    net = torch.nn.Sequential(*layers).double()
    m = DDP(net, bucket_cap_mb=0.002, **{option: True})
    o = torch.optim.SGD(net.parameters(), lr=.1, momentum=.9)
    g = torch.Generator().manual_seed(first)
    for step in range(8):
        o.zero_grad()
        if step == 3 and first == victim:
            net[0].weight.register_hook(lambda g: os.kill(os.getpid(), signal.SIGKILL))
        x = torch.randn(6, 20, generator=g, dtype=torch.float64)
        if step == 5 and option != "static_graph":
            with m.no_sync():
                m(x).sum().backward()
        m(x).sum().backward()
        o.step()
    dist.broadcast(net[1].running_mean, 0)
    values = torch.cat([each.detach().flatten() for each in net.parameters()])
    out.append((dist.get_world_size(), hashlib.sha256(values.numpy().tobytes()).hexdigest()))
print("END", out, flush=True)
dist.destroy_process_group()
"""


def test_a_rank_is_lost_in_backward_with_each_option_of_ddp(launcher: Launcher, tmp_path: Path, installed: str) -> None:
    (tmp_path / "train.py").write_text(OPTIONS)
    ended = launcher.run("-np", "5", "--min-np", "2", *GO_ON, "python", "train.py", PYTHONPATH=path(installed))
    assert ended.returncode == 0, ended.stderr
    found = re.findall(r"END (.*)", ended.stdout)
    assert len(found) == 2 and found[0] == found[1], ended.stdout
    assert re.findall(r"\((\d), ", found[0]) == ["4", "3", "2"]


REFUSED = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
dist.init_process_group("gloo")
one, peer = torch.ones(2), 1 - dist.get_rank()

def model(kind=torch.nn.Linear, *arguments, **options):
    return DistributedDataParallel(kind(*(arguments or (2, 2)), **options))

def joins():
    found = model()
    with found.join():
        found(one[None]).sum().backward()

def shards():
    from torch.distributed.fsdp import fully_shard
    found = fully_shard(torch.nn.Linear(2, 2))
    found(one[None])

def synchronises():
    model(torch.nn.SyncBatchNorm, 2)

for what in (
    lambda: dist.all_reduce(one.to("meta")),
    lambda: dist.new_group([0, 1]), lambda: dist.send(one, peer), lambda: dist.recv(one, peer),
    lambda: dist.group.WORLD.abort(),
    lambda: dist.group.WORLD.monitored_barrier(), lambda: model().register_comm_hook(None, default_hooks.fp16_compress_hook),
    lambda: model(torch.nn.Embedding, 2, 2, sparse=True), joins, shards, synchronises,
):
    try:
        what()
    except NotImplementedError as error:
        print("refused:", error, flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_what_cannot_go_on_is_refused_by_name(launcher: Launcher, tmp_path: Path, installed: str) -> None:
    (tmp_path / "train.py").write_text(REFUSED)
    ended = launcher.run("-np", "2", "--min-np", "1", *GO_ON, "python", "train.py", PYTHONPATH=path(installed))
    assert ended.returncode == 0, ended.stderr
    mine = [line for line in ended.stdout.splitlines() if line.startswith("[1]")]
    refused = [line for line in mine if "refused: --on-loss continue does not support" in line]
    names = [
        "tensors on a device", "groups beside", "send()", "recv()", "abort()", "monitored_barrier()", "communication hooks",
        "sparse gradients", "join()", "FSDP", "SyncBatchNorm",
    ]  # fmt: skip
    assert len(refused) == len(names), refused
    for line, name in zip(refused, names, strict=True):
        assert name in line


ALL_RAISE = """
import time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(4))
time.sleep(0.2 * (dist.get_world_size() - 1 - rank))  # the others raise while the next round begins
raise RuntimeError(f"rank {rank} raises")
"""


def test_ranks_that_end_while_they_should_go_on_are_named(launcher: Launcher, tmp_path: Path, installed: str) -> None:
    (tmp_path / "train.py").write_text(ALL_RAISE)
    ended = launcher.run("-np", "3", "--min-np", "2", *GO_ON, "python", "train.py", PYTHONPATH=path(installed))
    assert ended.returncode == 1
    assert "rank 2 raises" in ended.stderr and "failed first" in ended.stderr
    assert "could not begin" not in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-np", "2"], "--on-loss continue is for elastic jobs; give --min-np"),
        (["--host-discovery-script", "true", "--min-np", "1"], "does not support --host-discovery-script"),
    ],
)
def test_jobs_that_cannot_go_on_are_refused(launcher: Launcher, arguments: list[str], text: str) -> None:
    ended = launcher.run(*arguments, "--on-loss", "continue", "python", "-c", "pass")
    assert ended.returncode and text in ended.stderr


@pytest.mark.parametrize("call", ["hvd.init()", "hvd.elastic.run(lambda state: None)(hvd.elastic.TorchState())"])
def test_scripts_that_use_hvd_are_refused(launcher: Launcher, call: str) -> None:
    ended = launcher.run(
        "-np", "1", "--min-np", "1", "--on-loss", "continue", "python", "-c", f"import horovod.torch as hvd; {call}"
    )
    assert ended.returncode and "--on-loss continue is for scripts" in ended.stderr


def test_without_a_launcher_of_elastic_jobs_it_is_refused(launcher: Launcher) -> None:
    script = 'import torch.distributed as dist; dist.init_process_group("horovod")'
    ended = launcher.run("-np", "1", "python", "-c", f"import horovod.torch; {script}", HOROVOD_ON_LOSS="continue")
    assert ended.returncode and "needs horovodrun with --min-np" in ended.stderr


def test_the_example_trains(launcher: Launcher, installed: str) -> None:
    arguments = ["python", EXAMPLE, "--epochs", "2", "--pause", "0"]
    ended = launcher.run("-np", "2", "--min-np", "1", *GO_ON, *arguments, PYTHONPATH=path(installed))
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"epoch 1: loss \d\.\d+, 2 ranks", ended.stdout)
