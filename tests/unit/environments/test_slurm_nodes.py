"""Slurm's short lists of nodes and ports are written out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.environments.slurm_nodes import expand_nodes, expand_ports


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("login", ["login"]),
        ("n1,n2", ["n1", "n2"]),
        ("node[01-03,07]", ["node01", "node02", "node03", "node07"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("gpu[1-2]-ib,cpu-[3].local", ["gpu1-ib", "gpu2-ib", "cpu-3.local"]),
        ("r[0-1]n[1-2]", ["r0n1", "r0n2", "r1n1", "r1n2"]),
        ("b[2,1],a", ["b2", "b1", "a"]),
    ],
)
def test_nodes_stand_in_the_lists_order(text: str, nodes: list[str]) -> None:
    assert expand_nodes(text) == nodes


@pytest.mark.parametrize(
    "text",
    ["", "n[1-", "n1-2]", "n[a-b]", "n[3-1]", "n[]", "n1,,n2", "n[1-999999999]", "n[0-999]x[0-999]", "a b", "n[[1]]"],
)
def test_what_is_no_list_is_an_error_that_quotes_it(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not of the form|counts down|more than"):
        expand_nodes(text)


@given(
    st.lists(
        st.tuples(st.sampled_from(["n", "gpu-", "x7y"]), st.integers(0, 50), st.integers(0, 9), st.integers(1, 4)),
        min_size=1,
        max_size=5,
    )
)
def test_every_range_is_counted_out(groups: list[tuple[str, int, int, int]]) -> None:
    text = ",".join(f"{name}[{first:0{width}d}-{first + more:0{width}d}]" for name, first, more, width in groups)
    expected = [f"{name}{n:0{width}d}" for name, first, more, width in groups for n in range(first, first + more + 1)]
    assert expand_nodes(text) == expected


def test_ports() -> None:
    assert expand_ports("12000-12002,12010") == [12000, 12001, 12002, 12010]
    for wrong in ("0", "70000", "x", "5-3"):
        with pytest.raises(ValueError):
            expand_ports(wrong)
