"""``--on-loss continue`` on several hosts: a host is lost, or cut off while it lives on; never do two parts of a job go on."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from cluster.conftest import Cluster

SILENT_SECONDS = 4
"""After so long ranks give up others that are silent."""
LOST_AFTER_SECONDS = 15
"""After so long a launcher gives up an agent, and an agent its launcher."""
WAITING_SECONDS = 2 * LOST_AFTER_SECONDS + 30

RANK = """
import json, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import horovod.torch

folder = Path.cwd()
dist.init_process_group("horovod")
first = dist.get_rank()
with open(folder / f"seen.{first}", "a") as seen:
    over, step = torch.zeros(1), 0
    while not over.item():
        total, over = torch.full((1,), 2.0 ** first), torch.tensor([float((folder / "end").exists())])
        dist.all_reduce(total)
        step += 1
        print(json.dumps([step, dist.get_world_size(), total.item()]), file=seen, flush=True)
        if step % 20 == 0:
            print(f"trains with {dist.get_world_size()}", flush=True)
        dist.all_reduce(over)
        time.sleep(0.005)
dist.destroy_process_group()
(folder / f"ended.{first}").touch()
"""


class Step(NamedTuple):
    """What a rank has seen of one step: its number, how many ranks there were after it, and the sum of their bits."""

    number: int
    size: int
    members: float


def start(cluster: Cluster, hosts: str, on_loss: str = "continue") -> subprocess.Popen[str]:
    words = ("-H", hosts, "--min-np", "1", "--on-loss", on_loss, "python", cluster.script(RANK))
    return cluster.start(*words, HOROVOD_GLOO_TIMEOUT_SECONDS=str(SILENT_SECONDS))


def seen(folder: Path, rank: int) -> list[Step]:
    return [Step(*json.loads(line)) for line in (folder / f"seen.{rank}").read_text().splitlines()]


def check(cluster: Cluster, left: list[int], lost: list[int]) -> None:
    """The ranks that are left have seen the same. Those that were lost have seen that, too, but for the last step: the others
    may have made it again without them."""
    ended = sorted(int(path.suffix[1:]) for path in cluster.folder.glob("ended.*"))
    assert ended == left
    steps = seen(cluster.folder, left[0])
    assert steps[-1].members == sum(2.0**rank for rank in left)
    assert all(seen(cluster.folder, rank) == steps for rank in left)
    for rank in lost:
        own = seen(cluster.folder, rank)
        assert own[:-1] == steps[: len(own) - 1], f"rank {rank} went on without the others"


def end(cluster: Cluster, process: subprocess.Popen[str]) -> str:
    (cluster.folder / "end").touch()
    done = cluster.finish(process, WAITING_SECONDS)
    assert done.returncode == 0, done.stderr
    cluster.hosts.await_nothing(WAITING_SECONDS)
    return done.stderr


def test_a_host_whose_cable_is_pulled_out_is_left_behind_and_not_taken_back(cluster: Cluster) -> None:
    process = start(cluster, "hostA:2,hostB:2")
    cluster.await_line(process, "trains with 4", times=4)
    cluster.hosts.link("hostB", up=False)
    cluster.await_line(process, "trains with 2", times=2)
    cluster.hosts.link("hostB", up=True)
    said = end(cluster, process)
    check(cluster, [0, 1], [2, 3])
    assert re.search(r"rank 2 on hostB .* were lost while the others were in all_reduce", said), said


@pytest.mark.parametrize("on_loss", ["continue", "continue-any"])
def test_the_larger_part_goes_on_if_two_hosts_cannot_reach_each_other(cluster: Cluster, on_loss: str) -> None:
    """Rank 0 is in the smaller one, which goes on if it is needed."""
    process = start(cluster, "hostB:1,hostC:2,hostA:1", on_loss)
    cluster.await_line(process, "trains with 4", times=4)
    with cluster.hosts.no_way("hostB", "hostC"):
        left, lost = ([0, 3], [1, 2]) if on_loss == "continue" else ([1, 2, 3], [0])
        cluster.await_line(process, f"trains with {len(left)}", times=len(left))
        said = end(cluster, process)
    check(cluster, left, lost)
    assert "cannot reach each other, and it was killed" in said
