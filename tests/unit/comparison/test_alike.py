"""The account of what differs between ranks."""

from __future__ import annotations

from horovod.comparison.alike import Alike, describe_differences


def test_the_account_names_what_differs_on_which_ranks_and_the_usual_cause() -> None:
    held = {
        0: {"lr of group 0": "0.1", "momentum of group 0": "0.9"},
        1: {"lr of group 0": "0.05", "momentum of group 0": "0.9"},
        2: {"lr of group 0": "0.1", "momentum of group 0": "0.9"},
    }
    text = describe_differences(Alike.HYPERPARAMETERS, held, "the optimizer made at train.py:7")
    assert "(of the optimizer made at train.py:7)" in text
    assert "lr of group 0: 0.1 on ranks 0, 2, 0.05 on rank 1" in text
    assert "momentum" not in text and "ReduceLROnPlateau" in text


def test_many_differences_are_counted_and_missing_ones_are_named() -> None:
    held = {rank: {f"layer{number}": str(rank) for number in range(5 + rank)} for rank in range(2)}
    text = describe_differences(Alike.PARAMETERS, held)
    assert "layer0: 0 on rank 0, 1 on rank 1" in text and "and 3 more" in text and "broadcast_parameters" in text
    assert "nothing on rank 0" in describe_differences(Alike.PARAMETERS, {0: {}, 1: {"layer": "1"}})
