"""Votes on how many calls all ranks have completed, in random schedules."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import numpy as np
import pytest

from horovod.comm.reduction import ReduceOp
from horovod.core.errors import HorovodInternalError
from horovod.core.requests.handle import End, Handle
from horovod.core.requests.tensor import Tensor
from horovod.torch.distributed.on_loss.votes import Votes

CALLS = 12


class _Part(NamedTuple):
    """A rank's part in one vote: its memory, and what it gave."""

    values: np.ndarray
    given: int
    handle: Handle


class _Ranks:
    """Ranks and the allreduces among them, which reach each rank at a moment of its own, or never."""

    def __init__(self, size: int) -> None:
        self.begun: list[list[_Part]] = [[] for _ in range(size)]
        self.ended = [0] * size
        self.votes = [
            Votes(lambda tensors, op, end, rank=rank: self._begin(rank, tensors, op, end)) for rank in range(size)
        ]

    def _begin(self, rank: int, tensors: Sequence[Tensor], op: ReduceOp, end: End) -> Handle:
        assert op is ReduceOp.MIN
        assert len(self.begun[rank]) == self.ended[rank], "one vote at a time"
        [tensor] = tensors
        part = _Part(tensor.array, int(tensor.array[0]), Handle(end))
        self.begun[rank].append(part)
        return part.handle

    def ready(self) -> list[int]:
        """The ranks that a result may reach now: all ranks have begun that vote."""
        fewest = min(map(len, self.begun))
        return [rank for rank, ended in enumerate(self.ended) if ended < fewest]

    def reach(self, rank: int, error: Exception | None = None) -> None:
        number = self.ended[rank]
        self.ended[rank] += 1
        if error is None:
            self.begun[rank][number].values[0] = min(begun[number].given for begun in self.begun)
        self.begun[rank][number].handle.complete(error)


@pytest.mark.parametrize("seed", range(60))
def test_all_ranks_come_to_know_of_every_call_that_all_have_completed_and_of_no_other(seed: int) -> None:
    chance = Random(seed)
    size = chance.randint(2, 5)
    ranks, completed = _Ranks(size), [0] * size
    while True:
        behind = [rank for rank in range(size) if completed[rank] < CALLS]
        ready = ranks.ready()
        if not (behind or ready):
            break
        if behind and (not ready or chance.random() < 0.5):
            rank = chance.choice(behind)
            completed[rank] += chance.randint(1, CALLS - completed[rank])
            ranks.votes[rank].publish(completed[rank])
        else:
            ranks.reach(chance.choice(ready))
        assert all(votes.lowest() <= min(completed) for votes in ranks.votes)
    assert [votes.lowest() for votes in ranks.votes] == [CALLS] * size
    assert all(votes.await_all(CALLS, 0) for votes in ranks.votes)
    assert len({*map(len, ranks.begun)}) == 1, "some ranks began a vote that others never do"


def test_a_vote_that_fails_is_the_last() -> None:
    ranks = _Ranks(2)
    for votes in ranks.votes:
        votes.publish(1)
    ranks.reach(0)
    ranks.reach(1, HorovodInternalError("a rank was lost"))
    ranks.votes[1].publish(2)
    assert (ranks.votes[0].lowest(), ranks.votes[1].lowest()) == (1, 0)
    assert not ranks.votes[1].is_open() and not ranks.votes[1].await_all(1, 0)
    assert len(ranks.begun[1]) == 1


def test_a_runtime_that_has_ended_fails_the_vote() -> None:
    def refuse(tensors: Sequence[Tensor], op: ReduceOp, end: End) -> Handle:
        raise HorovodInternalError("the job has failed")

    votes = Votes(refuse)
    votes.publish(1)
    assert not votes.is_open() and not votes.await_all(1, 0)
