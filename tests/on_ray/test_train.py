"""``horovod.ray.train`` on a real cluster: Ray starts, watches and replaces the workers, which are the ranks."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

from elastic_ddp_rank import reference
from on_ray.ray_cluster import TRAINING, TRAINING_SECONDS, RayCluster
from time_limits import SOON

_TOLERANCE = 1e-9
pytestmark = pytest.mark.timeout(TRAINING_SECONDS + SOON)


@pytest.mark.parametrize(("way", "fails"), [("hvd", "raise"), ("ddp", "exit")])
def test_all_begin_again_at_the_last_checkpoint(cluster: RayCluster, way: str, fails: str) -> None:
    found = cluster.result("fixed", way, fails, script=TRAINING)
    assert found["checkpoint"]
    metrics = found["metrics"]
    assert (metrics["epoch"], metrics["ranks"]) == (4, [0, 0, 4, 0]) and metrics["begin"] in (1, 2)
    assert _differ(metrics["values"], reference([[4, 20]])) < _TOLERANCE


def test_the_error_of_a_rank_is_that_of_the_trainer(cluster: RayCluster) -> None:
    found = cluster.result("without_retry", script=TRAINING)
    assert "no data on this rank" in found


@pytest.mark.parametrize(("way", "kills"), [("hvd", "1"), ("ddp", "0")])
def test_only_the_lost_worker_is_replaced(
    cluster: RayCluster, capsys: pytest.CaptureFixture[str], way: str, kills: str
) -> None:
    found = cluster.result("elastic", way, kills, "4", "3", "4", script=TRAINING)
    survivors = _judge(found, sizes=[4, 3, 4], processes=5)
    _say_when_they_went_on(capsys, "worker", found["killed"][0], survivors)


def test_survivors_of_a_lost_node_go_on_and_another_one_takes_its_place(
    cluster: RayCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    process = cluster.program("elastic", "hvd", "-", "4", "2", "4", script=TRAINING)
    folder = _folder(process)
    deadline = time.monotonic() + TRAINING_SECONDS
    while not (folder / "4.seen").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)  # between two looks
    new, lost = cluster.spare, time.time()
    cluster.replace_second()
    found = cluster.finish(process, TRAINING_SECONDS)
    survivors = _judge(found, sizes=[4, 2, 4], processes=6)
    _say_when_they_went_on(capsys, "node", lost, survivors)
    hosts = sorted(name.partition(".")[0] for name in found["final"])
    assert hosts == ["hostA", "hostA", new, new]


def test_settings_that_cannot_be_met_are_refused() -> None:
    pytest.importorskip("ray.train.torch")
    from horovod.ray.train import HorovodConfig
    from horovod.ray.train.torch import TorchConfig

    with pytest.raises(ValueError, match="min_workers must be at least 1, not 0"):
        _ = HorovodConfig(min_workers=0).backend_cls
    with pytest.raises(ValueError, match=r"use ray\.train\.torch\.TorchConfig for others"):
        TorchConfig(backend="gloo")


def _folder(process: subprocess.Popen[str]) -> Path:
    assert process.stdout is not None
    line = ""
    while not line.startswith("folder: "):
        line = process.stdout.readline()
        assert line or process.poll() is None
    return Path(line.removeprefix("folder: ").strip())


def _judge(found: dict[str, Any], sizes: list[int], processes: int) -> list[list[Any]]:
    """Survivors have made the steps of all rounds in their processes, and all ranks have the values of one process.

    Args:
        sizes: of rounds; there may be others in between, since Ray replaces one worker after another.

    Returns:
        What each survivor has seen.
    """
    finals = list(found["final"].values())
    assert len(finals) == 4 and len(found["seen"]) == processes
    assert len({json.dumps(each) for each in finals}) == 1
    final = finals[0]
    assert [size for size, _ in final["runs"] if size in sizes] == sizes and final["left"] == []
    assert _differ(final["values"], reference(final["runs"])) < _TOLERANCE
    survivors = [seen for name, seen in found["seen"].items() if name in found["final"] and seen[0][0] == 0]
    assert len(survivors) == sizes[1]
    assert all(list(dict.fromkeys(size for _, size, *_ in seen))[:2] == sizes[:2] for seen in survivors)
    assert found["metrics"]["size"] == sizes[2], "reports and their checkpoints go on after a replacement"
    return survivors


def _say_when_they_went_on(
    capsys: pytest.CaptureFixture[str], what: str, lost: float, survivors: list[list[Any]]
) -> None:
    """Print how long after the loss the last of the survivors has made its first step without those that were lost."""
    first = [next(at for _, size, _, at in seen if size < 4 and at > lost) for seen in survivors]
    with capsys.disabled():
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
        print(
            f"\nnext step of all survivors {max(first) - lost:.2f} s after the {what} was lost; load {load:.1f} a core"
        )


def _differ(values: list[float], right: list[float]) -> float:
    return max(abs(value - other) for value, other in zip(values, right, strict=True))
