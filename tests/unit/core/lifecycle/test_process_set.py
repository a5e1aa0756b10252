"""Process sets as objects: what they are made of, and what they know before, while and after they are registered."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from horovod.common import process_sets as public
from horovod.core.lifecycle.process_set import ProcessSet, global_process_set, membership

NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."


@pytest.fixture
def registered() -> Iterator[None]:
    """This process is rank 3 of 6; set 1 has ranks 1, 3 and 5."""
    membership.rank, membership.ranks = 3, {0: list(range(6)), 1: [1, 3, 5], 2: [0, 2]}
    yield
    membership.clear()


def made(ranks: list[int], number: int | None) -> ProcessSet:
    found = ProcessSet(ranks)
    found.process_set_id = number
    return found


@pytest.mark.parametrize("ranks", [[3, 1], (3, 1), {1, 3}, range(1, 4, 2), iter([1, 3]), np.array([3, 1])])
def test_any_iterable_of_integers_in_ascending_order(ranks: object) -> None:
    assert ProcessSet(ranks).ranks == [1, 3]


@pytest.mark.parametrize("ranks", [5, None, 1.5, object()])
def test_what_is_no_iterable(ranks: object) -> None:
    with pytest.raises(ValueError, match="should be initialized with a list of process ranks or an mpi4py Comm object"):
        ProcessSet(ranks)


@pytest.mark.parametrize("ranks", [["1"], [0, 1.0], [True], [None], [np.bool_(True)], np.arange(2.0), "01"])
def test_invalid_ranks_are_refused(ranks: object) -> None:
    with pytest.raises(ValueError, match="ProcessSet should be initialized with a list of process ranks"):
        ProcessSet(ranks)


def test_an_unregistered_set_knows_nothing_yet() -> None:
    one = ProcessSet([0, 1])
    assert (one.process_set_id, one.size(), one.rank(), one.mpi_comm) == (None, None, None, None)
    assert str(one) == repr(one) == "ProcessSet(process_set_id=None, ranks=[0, 1], mpi_comm=None)"


def test_the_class_itself_has_nothing() -> None:
    assert (ProcessSet.process_set_id, ProcessSet.ranks, ProcessSet.mpi_comm) == (None, None, None)


def test_before_init() -> None:
    with pytest.raises(ValueError) as caught:
        ProcessSet([0]).included()
    assert str(caught.value) == NOT_INITIALIZED
    for question in (made([0], 1).size, made([0], 1).rank, global_process_set.size, global_process_set.rank):
        with pytest.raises(ValueError) as caught:
            question()
        assert str(caught.value) == NOT_INITIALIZED


@pytest.mark.usefixtures("registered")
def test_a_member() -> None:
    one = made([1, 3, 5], 1)
    assert (one.size(), one.rank(), one.included()) == (3, 1, True)


@pytest.mark.usefixtures("registered")
def test_a_rank_that_is_not_a_member_is_an_error() -> None:
    one = made([0, 2], 2)
    assert (one.size(), one.included()) == (2, False)
    with pytest.raises(ValueError, match=r"Process is not part of provided process set\."):
        one.rank()


@pytest.mark.usefixtures("registered")
def test_inclusion_needs_no_registration() -> None:
    assert ProcessSet([3, 4]).included()
    assert not ProcessSet([4]).included()
    unknown = ProcessSet([])
    unknown.ranks = None
    assert unknown.included() is None


@pytest.mark.usefixtures("registered")
def test_a_set_that_was_removed() -> None:
    with pytest.raises(ValueError, match="has not been registered"):
        made([1], 9).size()


@pytest.mark.usefixtures("registered")
def test_the_global_set() -> None:
    assert (global_process_set.process_set_id, global_process_set.size(), global_process_set.rank()) == (0, 6, 3)


def test_sets_are_told_apart_by_identity() -> None:
    assert ProcessSet([0]) != ProcessSet([0])
    assert len({ProcessSet([0]), ProcessSet([0])}) == 2


def test_the_public_names_are_these_objects() -> None:
    assert public.ProcessSet is ProcessSet
    assert public.global_process_set is global_process_set
