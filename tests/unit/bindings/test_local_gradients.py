"""Gradients that a rank keeps are applied as given; the others are reduced, in their order."""

from __future__ import annotations

from horovod._bindings.local_gradients import reduce_shared


def test_gradients_that_are_kept_are_not_reduced() -> None:
    asked: list[list[int]] = []

    def reduce(shared: list[int]) -> list[str]:
        asked.append(shared)
        return [f"reduced {index}" for index in shared]

    assert reduce_shared(["a", "b", None, "d"], {1: "half of b", 2: None}, reduce) == [
        "reduced 0",
        "half of b",
        None,
        "reduced 3",
    ]
    assert asked == [[0, 3]]


def test_all_gradients_are_kept() -> None:
    assert reduce_shared(["a"], {0: "kept"}, lambda shared: shared) == ["kept"]
