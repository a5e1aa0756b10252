"""Which cores a rank has to compute with, and on which its worker threads run. Pure, but for the operating system's answers."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from horovod._base.config import THREADS
from horovod.core.worker.cpu_affinity import (
    ANYWHERE,
    CpuPlacement,
    CpuResources,
    crowded,
    own_cpu_resources,
    placement_of,
)


def of(*ranks: tuple[str, Sequence[int], int]) -> list[CpuResources]:
    return [CpuResources(host, list(cores), threads) for host, cores, threads in ranks]


def shares(*ranks: tuple[str, Sequence[int], int]) -> list[set[int]]:
    cpu_resources_by_rank = of(*ranks)
    return [set(placement_of(cpu_resources_by_rank, rank).share) for rank in range(len(cpu_resources_by_rank))]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([("a", range(4), 2), ("a", range(4), 2)], True),
        ([("a", range(4), 1), ("a", range(4), 2)], False),
        ([("a", range(4), 4), ("b", range(4), 1)], True),
        ([("a", range(2), 1), ("a", range(2, 4), 1)], False),  # bound apart
        ([("a", range(2), 2), ("a", range(2, 4), 2)], True),
        ([("a", range(8), 1)], False),
    ],
)
def test_a_host_is_crowded_when_its_ranks_compute_on_all_cores(
    ranks: list[tuple[str, Sequence[int], int]], expected: bool
) -> None:
    assert crowded(of(*ranks)) is expected


def test_ranks_of_a_crowded_host_deal_out_its_cores() -> None:
    assert shares(("a", [0, 1], 1), ("a", [0, 1], 1)) == [{0}, {1}]
    assert shares(*[("a", [0, 2, 4, 6, 8, 9, 10], 3)] * 3) == [{0, 2}, {4, 6}, {8, 9, 10}]
    assert shares(("a", [0, 1], 1), ("b", [0, 1], 1), ("a", [0, 1], 1), ("b", [0, 1], 1)) == [{0}, {0}, {1}, {1}]


def test_ranks_that_are_bound_apart_or_have_too_few_cores_are_left_alone() -> None:
    assert shares(("a", [0], 1), ("a", [1], 1)) == [set(), set()]
    assert shares(*[("a", [0, 1], 1)] * 3) == [set()] * 3
    assert shares(("a", [0, 1], 2)) == [set()]
    assert shares(("a", range(4), 1), ("a", range(4), 1)) == [set(), set()]  # two cores are free


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([[0, 1], [0, 1]], [True, True]),
        ([[0, 1]] * 3, [False] * 3),
        ([[0], [1], [2]], [True] * 3),  # bound, each to a core of its own
        ([[3], [3]], [False, False]),
        ([[0], [0], [0, 1, 2]], [False] * 3),  # enough cores together, and two ranks on one of them
        ([[0, 1], [1, 2], [2, 0]], [True] * 3),
        ([[0, 1], [0], [5, 6], [5], [5]], [True, True, False, False, False]),
    ],
)
def test_a_rank_spins_where_no_rank_of_its_host_needs_the_core(ranks: list[list[int]], expected: list[bool]) -> None:
    cpu_resources_by_rank = of(*[("a", cores, 1) for cores in ranks], ("b", [0], 1))
    assert [placement_of(cpu_resources_by_rank, rank).spins for rank in range(len(ranks))] == expected
    assert placement_of(cpu_resources_by_rank, len(ranks)).spins  # alone on its host


def test_a_core_that_the_user_has_chosen_is_the_one() -> None:
    cpu_resources_by_rank = of(("a", [0, 1], 1), ("a", [0, 1], 1))
    assert placement_of(cpu_resources_by_rank, 1, core=5) == CpuPlacement(5)
    assert placement_of(cpu_resources_by_rank, 1) == CpuPlacement(share=frozenset({1}))
    assert placement_of(of(("a", [0, 1], 1)), 0) == ANYWHERE


def test_the_cores_and_threads_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.delenv(THREADS, raising=False)
    assert own_cpu_resources("here") == CpuResources("here", cores, len(cores))
    for text, threads in (("3", 3), ("5,2", 5), ("0", len(cores)), ("many", len(cores))):
        monkeypatch.setenv(THREADS, text)
        assert own_cpu_resources("here").threads == threads


def test_a_thread_is_confined_for_a_block_and_free_again_whatever_happens() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ZeroDivisionError), CpuPlacement(share=frozenset({max(before)})).at_work():
        assert os.sched_getaffinity(0) == {max(before)}
        raise ZeroDivisionError
    assert os.sched_getaffinity(0) == before
    for placement in (CpuPlacement(share=frozenset({1_000_000})), ANYWHERE):
        with placement.at_work():
            assert os.sched_getaffinity(0) == before
        assert os.sched_getaffinity(0) == before
