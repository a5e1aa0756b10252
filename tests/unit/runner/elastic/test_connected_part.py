"""The part of a broken network that a job goes on with, beside a look at every set of hosts."""

from __future__ import annotations

from itertools import chain, combinations

from hypothesis import given
from hypothesis import strategies as st

from horovod.runner.elastic.connected_part import connected_part

HOSTS = "abcdefg"
PAIRS = [frozenset(pair) for pair in combinations(HOSTS, 2)]


@given(
    ranks=st.fixed_dictionaries({host: st.integers(1, 3) for host in HOSTS}),
    cut=st.sets(st.sampled_from(PAIRS)),
    first=st.sampled_from(HOSTS),
    needs_first=st.booleans(),
)
def test_it_has_the_most_ranks_of_all_parts_without_a_broken_pair(
    ranks: dict[str, int], cut: set[frozenset[str]], first: str, needs_first: bool
) -> None:
    def weight(part: set[str]) -> tuple[int, bool]:
        return sum(ranks[host] for host in part), first in part

    parts = map(set, chain.from_iterable(combinations(HOSTS, count) for count in range(len(HOSTS) + 1)))
    whole = [part for part in parts if not any(pair <= part for pair in cut) and (first in part or not needs_first)]
    found = connected_part(ranks, cut, first, needs_first=needs_first)
    assert found in whole
    assert weight(found) == max(map(weight, whole))


def test_many_hosts_that_are_all_cut_off_from_many_others_take_no_time() -> None:
    hosts = [f"h{number}" for number in range(200)]
    cut = {frozenset((one, other)) for one in hosts[:100] for other in hosts[100:]}
    assert len(connected_part(dict.fromkeys(hosts, 2), cut, "h0", needs_first=True)) == 100
    assert connected_part({"a": 1, "b": 1}, {frozenset("ax"), frozenset("")}, "a", needs_first=False) == {"a", "b"}
