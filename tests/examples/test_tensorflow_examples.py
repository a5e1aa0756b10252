"""The examples of TensorFlow on real ranks: two processes learn one model, and one of them speaks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("sklearn")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize(
    ("script", "accuracy", "least"),
    [
        ("tensorflow2_mnist.py", r"test accuracy ([\d.]+)%", 75.0),
        ("tensorflow2_mnist_elastic.py", r"test accuracy ([\d.]+)%", 75.0),
        ("tensorflow2_keras_mnist_elastic.py", r"val_accuracy: ([\d.]+)", 0.75),
    ],
)
def test_two_processes_learn(example: Callable[..., list[Any]], script: str, accuracy: str, least: float) -> None:
    """The elastic ones with a fixed number of processes, as their readers start them first."""
    assert f"horovodrun -np 2 python examples/{script}" in (EXAMPLES / script).read_text()
    first, second = (ended.printed for ended in example(f"{script} --epochs 3"))
    accuracies = [float(found) for found in re.findall(accuracy, first)]
    losses = [float(found) for found in re.findall(r"\b(?:training )?loss:? ([\d.]+)", first)]
    assert len(accuracies) == 3 and accuracies[-1] > least, first
    assert losses[-1] < 0.5 * losses[0], first
    assert second == "", "one process speaks"


def test_the_example_of_keras_learns_and_writes_its_model_on_one_rank(
    example: Callable[..., list[Any]], tmp_path: Path
) -> None:
    first, second = (ended.printed for ended in example(f"keras_digits.py --model {tmp_path / 'model.keras'}"))
    (accuracy,) = re.findall(r"test accuracy ([\d.]+)%", first)
    assert float(accuracy) > 75 and second == "", first
    assert [path.name for path in tmp_path.iterdir()] == ["model.keras"]
