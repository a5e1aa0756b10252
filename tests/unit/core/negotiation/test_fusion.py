"""Batches: nothing lost, nothing mixed, nothing too large, and what belongs together in the order it became ready."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from horovod.core.negotiation.fusion import fuse
from horovod.core.negotiation.messages import Decision, Operation
from horovod.core.negotiation.ready_request import ReadyRequest


def ready(number: int, key: str | None = "k", size: int = 10) -> ReadyRequest:
    return ReadyRequest(
        Decision(number, str(number), Operation.ALLREDUCE), None if key is None else (key,), size, False
    )


def numbers(batches: list[list[ReadyRequest]]) -> list[list[int]]:
    return [[item.decision.identifier for item in batch] for batch in batches]


items = st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.integers(0, 50)), max_size=30).map(
    lambda pairs: [ready(number, key, size) for number, (key, size) in enumerate(pairs)]
)


@given(items, st.integers(0, 100), st.booleans())
def test_nothing_is_lost_and_nothing_comes_twice(items: list[ReadyRequest], threshold: int, groups_apart: bool) -> None:
    batches = fuse(items, threshold, groups_apart)
    assert all(batches)
    assert sorted(chain.from_iterable(numbers(batches))) == list(range(len(items)))


@given(items, st.integers(1, 100))
def test_a_batch_is_of_one_key_and_within_the_threshold(items: list[ReadyRequest], threshold: int) -> None:
    for batch in fuse(items, threshold):
        assert len({item.key for item in batch}) == 1
        if len(batch) > 1:
            assert batch[0].key is not None
            assert sum(item.size for item in batch) <= threshold


@given(items, st.integers(1, 100))
def test_decisions_of_one_key_keep_their_order(items: list[ReadyRequest], threshold: int) -> None:
    flat = list(chain.from_iterable(fuse(items, threshold)))
    for key in [("a",), ("b",), ("c",), None]:
        some = [item.decision.identifier for item in flat if item.key == key]
        assert some == sorted(some)


@given(items, st.integers(1, 100))
def test_the_same_input_gives_the_same_batches(items: list[ReadyRequest], threshold: int) -> None:
    assert fuse(items, threshold) == fuse(list(items), threshold)


def test_decisions_of_one_key_are_batched_across_others() -> None:
    some = [ready(0, "a"), ready(1, "b"), ready(2, "a"), ready(3, None), ready(4, "b"), ready(5, "a")]
    assert numbers(fuse(some, 100)) == [[0, 2, 5], [1, 4], [3]]


def test_the_threshold_is_what_a_batch_may_hold() -> None:
    assert numbers(fuse([ready(number) for number in range(5)], 20)) == [[0, 1], [2, 3], [4]]
    assert numbers(fuse([ready(number) for number in range(5)], 19)) == [[0], [1], [2], [3], [4]]


def test_a_decision_above_the_threshold_is_a_batch_of_its_own() -> None:
    assert numbers(fuse([ready(0, size=5), ready(1, size=500), ready(2, size=5), ready(3, size=5)], 10)) == [
        [0],
        [1],
        [2, 3],
    ]


def test_a_threshold_of_nothing_progress_fusion_off() -> None:
    assert numbers(fuse([ready(0, size=0), ready(1, size=0)], 0)) == [[0], [1]]


def test_groups_apart_are_never_mixed() -> None:
    assert numbers(fuse([ready(0), ready(1)], 100, groups_apart=True)) == [[0], [1]]


def test_nothing_ready() -> None:
    assert fuse([], 100) == []


def test_a_single_one() -> None:
    assert numbers(fuse([ready(0)], 5)) == [[0]]
