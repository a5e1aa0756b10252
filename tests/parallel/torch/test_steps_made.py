"""Numbers of steps are compared when ranks leave: a difference is one warning or error, and no rank waits for another."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from horovod.core.lifecycle import context
from regression import network
from time_limits import SOON

WIDTH = 6
CAUSE = "hvd.join() after the last batch"


def make(**wrapping: Any) -> tuple[torch.nn.Module, Any]:
    model = network()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), **wrapping)


def passes(model: torch.nn.Module, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()


def leave(by_exit: bool = False) -> list[str]:
    """Leave the job, as a script or at its end; what this rank is told."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            context._end() if by_exit else hvd.shutdown()
        except hvd.HorovodInternalError as error:
            assert not hvd.is_initialized()
            return [f"{type(error).__name__}: {error}"]
    return [str(each.message) for each in caught]


def one_more(odd: int, by_exit: bool = False, **wrapping: Any) -> list[str]:
    """Rank ``odd`` makes a step for which no rank sends anything."""
    model, optimizer = make(**wrapping)
    passes(model, optimizer, 2)
    if hvd.rank() == odd:
        with optimizer.skip_synchronize():
            optimizer.step()
    del optimizer
    return leave(by_exit)


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("by_exit", [False, True])
def test_a_difference_is_told_once_with_the_optimizer_the_numbers_and_the_cause(
    job: Any, odd: int, by_exit: bool
) -> None:
    (text,) = [each for texts in job(2, one_more, odd, by_exit) for each in texts]
    assert "different numbers of steps of the optimizer made at " in text and "test_steps_made.py" in text
    assert f"on rank {odd}" in text and "2" in text and "3" in text and CAUSE in text and "HOROVOD_CHECK" in text


def test_of_three_ranks_those_that_differ_from_the_first_to_leave_say_so(job: Any) -> None:
    told = job(3, one_more, 2)
    assert sum(map(bool, told)) == (1 if told[2] else 2)
    assert all("on rank 2" in text for texts in told for text in texts)


def test_it_is_an_error_or_nothing_if_the_settings_say_so(job: Any) -> None:
    (text,) = [each for texts in job(2, one_more, 1, env={"HOROVOD_CHECK": "error"}) for each in texts]
    assert text.startswith("MismatchError: Ranks have left with different numbers of steps")
    (text,) = [each for texts in job(2, one_more, 1, True, env={"HOROVOD_CHECK": "error"}) for each in texts]
    assert text.startswith("Ranks have left with different numbers of steps"), "at exit it can only be a warning"
    assert job(2, one_more, 1, env={"HOROVOD_CHECK": "off"}) == [[], []]


def test_a_rank_without_batches_that_left_is_named_with_its_steps(job: Any) -> None:
    def check() -> str:
        model, optimizer = make()
        passes(model, optimizer, 2)
        if hvd.rank() == 1:
            return "; ".join(leave())
        try:
            passes(model, optimizer, 1)
        except hvd.HorovodInternalError as error:
            assert not leave(), "the error has told it"
            return str(error)
        return "was not refused"

    text, nothing = job(2, check)
    assert not nothing
    assert (
        "rank 1: it left the job (hvd.shutdown() or the end of its script) after 2 steps of the optimizer made at"
        in text
    )


def test_steps_before_a_join_of_all_ranks_may_differ(job: Any) -> None:
    def check() -> list[str]:
        model, optimizer = make()
        passes(model, optimizer, 2 + hvd.rank())
        hvd.join()
        passes(model, optimizer, 2)
        return leave()

    assert job(2, check) == [[], []]


def test_ranks_that_are_alike_hear_nothing_whatever_they_reduce(job: Any) -> None:
    def check(sets: list[Any]) -> list[str]:
        for wrapping in ({}, {"op": hvd.Adasum}, {"process_set": sets[0]}):
            model, optimizer = make(**wrapping)
            if wrapping.get("process_set", hvd.global_process_set).included():
                passes(model, optimizer, 3)
        own, alone = make(process_set=sets[0])
        if hvd.rank() == 2:  # not a member, so its steps are its own
            passes(own, alone, 5)
        return leave()

    assert job(4, check, sets=[[0, 1]]) == [[]] * 4


def test_a_rank_that_has_failed_compares_nothing(job: Any) -> None:
    def check() -> list[str]:
        model, optimizer = make()
        passes(model, optimizer, 1)
        hvd.barrier()
        if hvd.rank() == 1:
            with optimizer.skip_synchronize():
                optimizer.step()
            time.sleep(0.5)  # rank 0 leaves the barrier
            context.current().watch.report(1, "it has failed in a test")
        assert context.current().termination.failed.wait(SOON)
        return leave()

    assert job(2, check) == [[], []]
