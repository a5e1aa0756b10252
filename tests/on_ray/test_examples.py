"""The examples of Ray Train, as a reader starts them: each starts a cluster on its host."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

from on_ray.ray_cluster import TRAINING_SECONDS, RayCluster
from time_limits import SOON

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = pytest.mark.timeout(TRAINING_SECONDS + SOON)


def test_the_example_learns(cluster: RayCluster) -> None:
    output = cluster.alone(EXAMPLES / "ray_train_digits.py", "--epochs", "5")
    found = re.search(r"accuracy ([\d.]+) on 2 ranks by horovod", output)
    assert found is not None and float(found[1]) > 0.7, output


def test_the_last_epoch_is_the_result_though_a_rank_is_lost_shortly_before(cluster: RayCluster) -> None:
    output = cluster.alone(EXAMPLES / "ray_train_elastic.py", "--lose-a-rank", "--epochs", "2")
    assert re.search(r"round 2 begins with 2 ranks", output), output
    (found,) = re.findall(r"^\{'epoch': (\d+), 'accuracy': ([\d.]+), 'ranks': (\d)\} Checkpoint", output, re.MULTILINE)
    assert (found[0], found[2]) == ("2", "3") and float(found[1]) > 0.7, output
    assert "the last ray.train.report was skipped" not in output
