"""Arguments of a distributed optimizer, checked before anything is made, and how gradients are named and cut."""

from __future__ import annotations

from typing import Any

import pytest

from horovod._keras.distribution import Distribution
from horovod._keras.settings import checked, users_objects
from horovod.comm.reduction import ReduceOp


def settings(**arguments: Any) -> Any:
    return checked(compression=None, **arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"op": ReduceOp.MIN}, "only supports Average and Sum"),
        ({"op": ReduceOp.SUM, "gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
        ({"gradient_predivide_factor": 0.0}, "gradient_predivide_factor"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step"),
        ({"groups": 0}, "groups"),
        ({"groups": True}, "groups"),
        ({"groups": "two"}, "groups"),
        ({"groups": ["kernel"]}, "groups"),
    ],
)
def test_a_wrong_argument_is_named_in_the_error(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        settings(**arguments)


def test_a_variable_in_two_groups_is_refused() -> None:
    variable = object()
    with pytest.raises(ValueError, match="only appear once"):
        settings(groups=[[variable], [variable]])


def test_num_groups_is_deprecated_and_means_groups() -> None:
    with pytest.warns(DeprecationWarning, match="groups"):
        assert settings(num_groups=3).groups == 3


def test_an_average_is_predivided_and_a_sum_is_not() -> None:
    assert settings(gradient_predivide_factor=4.0).scales(ReduceOp.AVERAGE, 3.0) == (0.25, 12.0)
    assert settings(gradient_predivide_factor=4.0).scales(ReduceOp.MAX) == (1.0, 1.0)
    assert settings(op=ReduceOp.SUM).scales(ReduceOp.SUM, 2.0) == (1.0, 2.0)


@pytest.mark.parametrize(("passes", "averaged", "factor"), [(1, False, 1.0), (4, False, 4.0), (4, True, 1.0)])
def test_accumulated_gradients_are_sums_unless_means_are_wanted(passes: int, averaged: bool, factor: float) -> None:
    made = settings(backward_passes_per_step=passes, average_aggregated_gradients=averaged)
    distribution = Distribution(made, lambda *_: [], id)
    assert distribution.accumulation(passes if passes > 1 else None) == factor


def test_groups_decide_which_gradients_share_a_request() -> None:
    variables = ["a", "b", "c", "d", "e"]

    def cut(groups: Any) -> Any:
        return Distribution(settings(groups=groups), lambda *_: [], lambda name: name)._cut(variables)

    assert cut(None) is None
    assert cut(2) == [[0, 1, 2], [3, 4]]
    assert cut(9) == [[0], [1], [2], [3], [4]]
    assert cut([["d", "b"], ["unknown"], ["e"]]) == [[3, 1], [4], [0], [2]]


def test_custom_optimizers_and_objects_are_passed_by_name() -> None:
    class Careful:
        pass

    assert users_objects([Careful], {"other": 1}) == {"Careful": Careful, "other": 1}
    assert users_objects(None, None) == {}
