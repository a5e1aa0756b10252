"""Which gradients the ranks have: the text by which they compare it, and what they reduce if it differs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from horovod.comparison.missing_gradients import GradientKind, describe, to_reduce

kinds = st.lists(st.sampled_from(GradientKind), min_size=1, max_size=12)


@given(kinds, kinds)
def test_texts_are_equal_only_if_the_ranks_have_the_same(one: list[GradientKind], two: list[GradientKind]) -> None:
    assert (describe(one) == describe(two)) == (one == two)


def test_the_text_has_the_positions() -> None:
    dense, none = GradientKind.DENSE, GradientKind.ABSENT
    assert describe([dense] * 3) == "all 3 gradients"
    assert describe([none] * 3) == "none of 3 gradients"
    assert describe([dense, dense, none, dense]) == "gradients 0-1, 3 of 4"
    assert describe([GradientKind.SPARSE, none, dense]) == "gradients 0, 2 of 3 (sparse: 0)"


@given(
    st.integers(1, 6).flatmap(
        lambda count: st.lists(
            st.lists(st.sampled_from(GradientKind), min_size=count, max_size=count), min_size=1, max_size=5
        )
    )
)
def test_what_any_rank_has_is_reduced_by_all(found: list[list[GradientKind]]) -> None:
    kinds = to_reduce(found)
    assert (kinds is None) == all(each == found[0] for each in found)
    for position, kind in enumerate(kinds or []):
        every = [each[position] for each in found]
        assert kind in every and bool(kind) == any(every)
        assert GradientKind.DENSE not in every or kind == GradientKind.DENSE


def test_ranks_with_different_numbers_of_variables_have_nothing_together() -> None:
    assert to_reduce([[3, 3], [3]]) is None
