"""Which engine is tried for a group, and what is said where none can be."""

from __future__ import annotations

import pytest

from horovod.comm.engine import EngineGroup
from horovod.comm.select import ENGINES, EngineError, Support, candidates, obstacles
from horovod.comm.spans import HOST

NONE: dict[str, str] = {"shm": "", "hierarchical": "all ranks of the group are on one host", "tcp": ""}


def _support(forced: list[str], found: list[dict[str, str]]) -> dict[int, Support]:
    """What the ranks 2 and 5 say."""
    return {rank: Support(*each) for rank, *each in zip((2, 5), forced, found, strict=True)}


def test_the_best_engine_without_obstacles_comes_first_and_the_others_are_its_replacements() -> None:
    assert candidates(_support(["", ""], [NONE, NONE]), "V") == ["shm", "tcp"]
    assert candidates(_support(["", ""], [NONE, NONE | {"shm": "no"}]), "V") == ["tcp"]


def test_a_forced_engine_is_the_only_one_even_if_one_rank_alone_forces_it() -> None:
    assert candidates(_support(["", "tcp"], [NONE, {"tcp": ""}]), "V") == ["tcp"]


def test_a_forced_engine_that_a_member_cannot_use_is_an_error_that_names_its_rank() -> None:
    with pytest.raises(EngineError, match=r"V=shm cannot serve this group: rank 5: why not"):
        candidates(_support(["shm", "shm"], [{"shm": ""}, {"shm": "why not"}]), "V")


def test_an_engine_that_does_not_exist_is_an_error_that_names_those_that_do() -> None:
    with pytest.raises(
        EngineError, match=r"V=pigeon: there is no such engine .*shm, hierarchical, tcp, gloo, mpi, ccl"
    ):
        candidates(_support(["", "pigeon"], [NONE, {}]), "V")


def test_ranks_that_force_different_engines_are_an_error() -> None:
    with pytest.raises(
        EngineError, match="ranks ask for different engines with V: gloo on rank 5, tcp on rank 2; use one"
    ):
        candidates(_support(["tcp", "gloo"], [{"tcp": ""}, {"gloo": ""}]), "V")


def test_an_engine_among_named_ones_need_not_be_chosen_by_itself() -> None:
    assert candidates(_support(["", ""], [{"gloo": ""}, {"gloo": ""}]), "V", ["gloo"]) == ["gloo"]


def test_a_group_that_no_engine_can_serve_is_told_why() -> None:
    with pytest.raises(EngineError, match=r"no engine can serve this group \(gloo: rank 5: PyTorch is missing\)"):
        candidates(_support(["", ""], [{"gloo": ""}, {"gloo": "PyTorch is missing"}]), "V", ["gloo"])


def test_only_engines_that_may_be_chosen_are_asked() -> None:
    group = EngineGroup(0, 2, ("a", "a"))
    assert set(obstacles(group)) == {each.name for each in ENGINES[HOST] if each.automatic}
    assert set(obstacles(group, forced="tcp")) == {"tcp"}
    assert set(obstacles(group, names=["gloo", "tcp"])) == {"gloo", "tcp"}
    assert "there is no such engine" in obstacles(group, forced="pigeon")["pigeon"]
