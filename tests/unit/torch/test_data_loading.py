"""What is counted of the batches that data loaders deliver."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from horovod.torch.optimizer.data_loading import samples_in


class Odd:
    """A batch of a class of its own, whose ``shape`` is no tensor's."""

    def shape(self) -> str:
        return "odd"


class Failing:
    @property
    def shape(self) -> tuple[int, ...]:
        raise RuntimeError("no shape yet")


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.ones(3, 2), 3),
        ([torch.ones(4, 2), torch.ones(4)], 4),
        ({"ids": np.ones((5, 1)), "more": 1}, 5),
        (({"x": torch.ones(6)},), 6),
        (torch.tensor(1.0), 0),
        (Odd(), 0),
        (Failing(), 0),
        ([Odd(), torch.ones(2)], 0),
        ([], 0),
        (None, 0),
        ("text", 0),
    ],
)
def test_the_rows_of_usual_batches_are_counted_and_others_are_left_alone(batch: Any, samples: int) -> None:
    assert samples_in(batch) == samples
