"""With a Keras that loses the last steps of an epoch, each step is a call of its own, for distributed models alone."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from horovod._keras import last_steps


class Model:
    """As of Keras: the function makes ``steps_per_execution`` steps, or none where the data end among them."""

    def __init__(self, distributed: bool) -> None:
        self.optimizer = SimpleNamespace(**({"_horovod": None} if distributed else {}))
        self.run_eagerly = False
        self.steps_per_execution = 2
        self.train_function: Any = None
        self.trained: list[int] = []

    def make_train_function(self, force: bool = False) -> None:
        if self.train_function is None or force:
            steps = self.steps_per_execution
            self.train_function = lambda data: self.trained.extend([next(data) for _ in range(steps)])


def fit(model: Any, data: Iterator[int]) -> list[int]:
    model.make_train_function()
    with pytest.raises(StopIteration):
        while True:
            model.train_function(data)
    trained: list[int] = model.trained
    return trained


def test_no_step_is_lost_where_the_data_end_within_an_execution() -> None:
    class Patched(Model):
        pass

    last_steps.patch_train_function(Patched)
    assert fit(Patched(distributed=False), iter(range(5))) == [0, 1, 2, 3]
    model = Patched(distributed=True)
    assert fit(model, iter(range(5))) == [0, 1, 2, 3, 4]
    assert model.steps_per_execution == 2, "as the script has set it"


def test_a_function_is_made_again_only_on_demand() -> None:
    class Patched(Model):
        pass

    last_steps.patch_train_function(Patched)
    model = Patched(distributed=True)
    model.make_train_function()
    first = model.train_function
    model.make_train_function()
    assert model.train_function is first
    model.make_train_function(force=True)
    assert model.train_function is not first and fit(model, iter(range(3))) == [0, 1, 2]


@pytest.mark.parametrize(("version", "lost"), [("3.5.0", True), ("3.6.0", True), ("3.7.0", False), ("3.10.0", False)])
def test_the_versions_that_lose_steps(version: str, lost: bool) -> None:
    assert last_steps.loses_last_steps(version) is lost
