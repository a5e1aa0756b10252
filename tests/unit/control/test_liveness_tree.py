"""Who is connected with whom for liveness: every rank is reached, from both sides alike, and rank 0 has few connections."""

from __future__ import annotations

import itertools
import random

import pytest

from horovod.control.liveness_tree import LivenessTree


def trees() -> list[tuple[int, list[list[int]]]]:
    dice = random.Random(5)
    found: list[tuple[int, list[list[int]]]] = [(1, []), (2, []), (9, []), (16, [[4, 5, 6, 7], range(8, 16, 2)])]  # type: ignore[list-item]
    for _ in range(50):
        size = dice.randrange(1, 40)
        ranks = dice.sample(range(1, size), size - 1)
        cuts = sorted(dice.choices(range(size), k=4))
        found.append((size, [sorted(ranks[start:stop]) for start, stop in itertools.pairwise(cuts)]))
    return found


@pytest.mark.parametrize(("size", "hosts"), trees())
def test_both_ends_of_a_connection_have_it_and_every_rank_is_reached(size: int, hosts: list[list[int]]) -> None:
    tree = LivenessTree(size, hosts)
    for rank in range(size):
        assert all(rank in tree.peers(peer) for peer in tree.peers(rank))
        assert set(tree.above(rank)) | {link for ways in tree.ways(rank).values() for link in ways} == set(
            tree.peers(rank)
        )
        for relay in tree.above(rank):
            assert tree.ways(relay)[rank][0] in (relay, rank, *tree.above(rank))
            assert relay == 0 or tree.above(relay) == (0,)  # two levels
    assert set(tree.ways(0)) == set(range(1, size))


@pytest.mark.parametrize(("size", "hosts"), trees())
def test_a_rank_behind_relays_has_two_of_its_own_host(size: int, hosts: list[list[int]]) -> None:
    tree = LivenessTree(size, hosts)
    for ranks in hosts:
        for rank in ranks:
            behind = len(ranks) > 2 and rank not in ranks[:2]
            assert list(tree.above(rank)) == (list(ranks[:2]) if behind else [0])


def test_without_hosts_every_rank_is_connected_with_rank_0_alone() -> None:
    tree = LivenessTree(5)
    assert tree.peers(0) == [1, 2, 3, 4]
    assert [tree.peers(rank) for rank in range(1, 5)] == [[0]] * 4


def test_rank_0_of_a_thousand_ranks_has_two_connections_a_host() -> None:
    tree = LivenessTree(1024, [range(first, first + 8) for first in range(8, 1024, 8)])
    assert len(tree.peers(0)) == 7 + 2 * 127
    assert max(len(tree.peers(rank)) for rank in range(1, 1024)) == 1 + 6
