"""The process sets that all ranks have asked for, every rank simulated."""

from __future__ import annotations

import pytest

from horovod._base.process_identity import ProcessIdentity
from horovod.core.lifecycle.initial_process_sets import RequestedSet, StaticSets, agree_on_process_sets, requested_sets
from horovod.core.lifecycle.process_set import ProcessSet
from horovod.core.lifecycle.world import World, choose


def listed(*ranks: int) -> RequestedSet:
    return RequestedSet(ranks)


def split(*groups: tuple[int, ...]) -> list[RequestedSet]:
    """By rank: its group of a communicator that was split so; nothing where it is in none."""
    size = max(rank for group in groups for rank in group) + 1
    return [RequestedSet(next((group for group in groups if rank in group), ()), True) for rank in range(size)]


def all_ranks(*entries: RequestedSet | list[RequestedSet], size: int) -> list[StaticSets]:
    """What every rank finds, from entries that are the same on all of them or one for each."""
    by_rank = [[each[rank] if isinstance(each, list) else each for each in entries] for rank in range(size)]
    return [agree_on_process_sets(by_rank, rank) for rank in range(size)]


def test_lists_are_numbered_in_their_order() -> None:
    for found in all_ranks(listed(1, 2), listed(0), listed(0, 2), size=3):
        assert found == StaticSets([[1, 2], [0], [0, 2]], [1, 2, 3], None)


def test_no_sets_at_all() -> None:
    assert all_ranks(size=2) == [StaticSets([], [], None)] * 2


def test_groups_of_communicators_come_first_in_ascending_order() -> None:
    found = all_ranks(listed(0, 3), split((1, 3), (0, 2)), split((3,), (0, 1, 2)), size=4)
    assert all(each.ranks == [[0, 2], [1, 3], [0, 1, 2], [3], [0, 3]] for each in found)
    assert [each.ids for each in found] == [[5, 1, 3], [5, 2, 3], [5, 1, 3], [5, 2, 4]]


def test_a_rank_outside_of_all_groups_has_no_such_set() -> None:
    found = all_ranks([*split((0, 1)), RequestedSet((), True)], size=3)
    assert [each.ids for each in found] == [[1], [1], [None]]
    assert all(each.ranks == [[0, 1]] for each in found)


@pytest.mark.parametrize(
    ("entries", "duplicate", "ids"),
    [
        ([listed(0, 1), listed(1, 2), listed(0, 1)], 2, [1, 2, None]),
        ([listed(0, 1, 2)], 0, [None]),
        ([listed(0), listed(0), listed(0, 1, 2)], 1, [1, None, None]),
        ([listed(1, 2), split((0,), (1, 2))], 0, [None, 1]),
    ],
)
def test_duplicates_are_left_out_and_told_to_all(
    entries: list[RequestedSet | list[RequestedSet]], duplicate: int, ids: list[int | None]
) -> None:
    found = all_ranks(*entries, size=3)
    assert {each.duplicate for each in found} == {duplicate}
    assert found[0].ids == ids


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (listed(0, 3), "rank 3 is not one of the job's 3"),
        (listed(-1, 0), "rank -1 is not one of the job's 3"),
        (listed(0, 0), "a rank is listed twice"),
        (listed(), "there is none"),
        (split((-1, 0), (1, 2)), "processes that are not in the job's communicator"),
        (
            [RequestedSet((0, 1), True), RequestedSet((1, 2), True), RequestedSet((1, 2), True)],
            "not all of its ranks passed the communicator",
        ),
    ],
)
def test_a_set_that_cannot_be_is_refused_on_all_ranks(entry: RequestedSet | list[RequestedSet], text: str) -> None:
    for rank in range(3):
        with pytest.raises(ValueError, match=r"^Horovod initialization failed: process set") as caught:
            agree_on_process_sets([[entry[each] if isinstance(entry, list) else entry] for each in range(3)], rank)
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        ([listed(1)], "rank 1 has [1]"),
        ([], "rank 1 has none"),
        ([RequestedSet((0,), True)], "rank 1 has [0] (of a communicator)"),
    ],
)
def test_ranks_that_were_given_different_sets(other: list[RequestedSet], shown: str) -> None:
    with pytest.raises(ValueError, match="the ranks were given different process sets") as caught:
        agree_on_process_sets([[listed(0)], other], 0)
    assert "Rank 0 has [0]" in str(caught.value)
    assert shown in str(caught.value)


def world() -> World:
    return choose(None, ProcessIdentity(0, 2, 0, 2, 0, 1, "host", "horovodrun", "job"))


def test_an_entry_that_is_no_process_set() -> None:
    with pytest.raises(ValueError, match="entry number 1 is \\[0\\] and not a ProcessSet"):
        requested_sets([ProcessSet([0]), [0]], world())  # type: ignore[list-item]
