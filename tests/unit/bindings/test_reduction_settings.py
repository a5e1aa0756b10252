"""What all bindings' optimizers have in common: scale factors, and the split of local and shared variables."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from horovod._bindings.local_variables import LocalVariables, checked_layers
from horovod._bindings.reduction_settings import ReductionSettings
from horovod.comm.reduction import ReduceOp
from horovod.core.lifecycle.process_set import ProcessSet, membership


@pytest.fixture
def half_of_four() -> Iterator[ProcessSet]:
    """A set of two of four ranks, of which this one is rank 1."""
    process_set = ProcessSet([0, 1])
    process_set.process_set_id = 1
    membership.rank, membership.ranks = 1, {0: [0, 1, 2, 3], 1: [0, 1]}
    yield process_set
    membership.clear()


def test_an_average_is_divided_before_the_sum_and_multiplied_afterwards() -> None:
    settings = ReductionSettings(predivide=4.0)
    assert settings.scales() == (0.25, 4.0)
    assert settings.scales(factor=0.5) == (0.25, 2.0)


def test_only_an_average_is_predivided() -> None:
    settings = ReductionSettings(predivide=4.0)
    assert settings.scales(ReduceOp.MAX, 3.0) == (1.0, 3.0)


def test_a_rank_outside_of_the_set_keeps_its_gradients(half_of_four: ProcessSet) -> None:
    assert ReductionSettings(process_set=half_of_four).active()
    membership.rank = 3
    assert not ReductionSettings(process_set=half_of_four).active()


def test_variables_are_split_by_their_key(half_of_four: ProcessSet) -> None:
    local = LocalVariables(half_of_four, scale=True, key=str.lower)
    local.add("Bias")
    assert local.split(["kernel", "BIAS", "bias", "scale"]) == ([1, 2], [0, 3])
    assert "bIAS" in local
    assert "kernel" not in local


def test_weights_that_a_local_layer_makes_later_are_local(half_of_four: ProcessSet) -> None:
    layer = SimpleNamespace(trainable_weights=[])
    local = LocalVariables(half_of_four, scale=True, key=str)
    local.add_layers([layer])
    assert local.split(["kernel"]) == ([], [0])
    layer.trainable_weights.append("kernel")
    assert local.split(["kernel"]) == ([0], [])


def test_local_layers_are_one_layer_or_several() -> None:
    def is_layer(thing: object) -> bool:
        return isinstance(thing, str) and thing.startswith("layer")

    assert checked_layers(None, is_layer, "Layer") == []
    assert checked_layers("layer 1", is_layer, "Layer") == ["layer 1"]
    assert checked_layers((f"layer {number}" for number in (1, 2)), is_layer, "Layer") == ["layer 1", "layer 2"]
    for wrong in (5, ["layer 1", "weight"]):
        with pytest.raises(ValueError, match="All local layers must be of Layer type"):
            checked_layers(wrong, is_layer, "Layer")


def test_local_gradients_are_divided_by_the_size_of_the_set(half_of_four: ProcessSet) -> None:
    assert LocalVariables(half_of_four, scale=True, key=id).divisor() == 2
    assert LocalVariables(half_of_four, scale=False, key=id).divisor() == 1


def test_a_rank_outside_of_the_set_does_not_divide(half_of_four: ProcessSet) -> None:
    membership.rank = 3
    assert LocalVariables(half_of_four, scale=True, key=id).divisor() == 1
