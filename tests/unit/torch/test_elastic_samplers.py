"""The samplers of elastic training: every sample of an epoch is in one recorded step, over any sequence of sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.torch.elastic import ElasticSampler, GlobalBatchSampler
from horovod.torch.elastic import sampler as module
from part import draws

Make = Callable[[], ElasticSampler]


class Job:
    """The samplers of all ranks of a job whose size changes: each has its own rank when it asks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
        self._rank_and_size = (0, 1)
        self._make = make
        monkeypatch.setattr(module, "rank", lambda: self._rank_and_size[0])
        monkeypatch.setattr(module, "size", lambda: self._rank_and_size[1])

    def ranks(self, size: int, state: dict[str, Any] | None = None) -> list[Any]:
        """New samplers, one a rank, at the position that ``state`` tells."""
        made = []
        for rank in range(size):
            self._rank_and_size = (rank, size)
            made.append(self._make())
            if state is not None:
                made[-1].load_state_dict(state)
        return made


ROUNDS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.booleans()), max_size=6)
"""Of each round: how many ranks, how many steps they record, and whether one more is under way when it ends."""


@settings(max_examples=draws(60), deadline=None)
@given(
    samples=st.integers(0, 60), batch=st.integers(1, 7), rounds=ROUNDS, shuffle=st.booleans(), epoch=st.integers(0, 3)
)
def test_every_sample_is_seen_once_over_any_sequence_of_sizes(
    samples: int, batch: int, rounds: list[tuple[int, int, bool]], shuffle: bool, epoch: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        job = Job(patch, lambda: ElasticSampler(range(samples), shuffle, seed=5))
        state = {"epoch": epoch, "processed_num": 0}
        recorded: Counter[int] = Counter()
        for size, steps, interrupted in [*rounds, (3, 10**6, False)]:
            ranks = job.ranks(size, state)
            lengths = {len(sampler) for sampler in ranks} | {len(list(sampler)) for sampler in ranks}
            assert len(lengths) == 1, "all ranks make the same number of steps"
            batches = [[list(s)[at : at + batch] for at in range(0, len(s), batch)] for s in ranks]
            for step in range(min(steps, len(batches[0]))):
                recorded.update(index for each in batches for index in each[step])
                for sampler in ranks:
                    sampler.record_batch(step, batch)
            if interrupted and steps + 1 < len(batches[0]):
                assert not recorded.keys() & {index for each in batches for index in each[steps]}
            states = [sampler.state_dict() for sampler in ranks]
            assert all(each == states[0] for each in states)
            state = states[0]
        assert set(recorded) == set(range(samples))
        twice = sum(recorded.values()) - samples
        assert twice < 5, "only those that fill up the last step of an epoch come again"


def test_a_batch_that_was_under_way_comes_again_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, lambda: ElasticSampler(range(12), shuffle=False))
    three = job.ranks(3)
    assert [list(each) for each in three] == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    for sampler in three:
        sampler.record_batch(0, 1)
    two = job.ranks(2, three[0].state_dict())  # 3, 4, 5 were under way
    assert [list(each) for each in two] == [[3, 5, 7, 9, 11], [4, 6, 8, 10, 3]]


def test_the_end_of_an_epoch_begins_the_next_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    (sampler,) = Job(monkeypatch, lambda: ElasticSampler(range(50))).ranks(1)
    first = list(sampler)
    sampler.record_batch(0, 50)
    sampler.reset()
    assert list(sampler) == [] and sampler.processed_num == 50
    sampler.set_epoch(1)
    assert sampler.processed_num == 0
    assert sorted(sampler) == sorted(first) and list(sampler) != first
    assert sampler.processed_indices == set()


def test_a_loader_is_not_disturbed_by_a_change_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    (sampler,) = Job(monkeypatch, lambda: ElasticSampler(range(6), shuffle=False)).ranks(1)
    loader = torch.utils.data.DataLoader(torch.arange(6), batch_size=2, sampler=sampler)
    seen = []
    for number, batch in enumerate(loader):
        seen += batch.tolist()
        sampler.record_batch(number, 2)
        sampler.reset()
    assert seen == [0, 1, 2, 3, 4, 5]


@settings(max_examples=draws(60), deadline=None)
@given(
    samples=st.integers(0, 50),
    whole=st.integers(5, 16),
    micro=st.none() | st.integers(1, 5),
    rounds=ROUNDS,
)
def test_global_batches_are_the_same_whatever_the_sizes(
    samples: int, whole: int, micro: int | None, rounds: list[tuple[int, int, bool]]
) -> None:
    """The n-th step has the same samples as in a job that was never interrupted, and the mean over them is exact."""
    values = torch.arange(samples, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        job = Job(patch, lambda: GlobalBatchSampler(values, whole, micro, seed=3))
        (alone,) = job.ranks(1)
        order = [index for part in alone for index in part]
        wanted = [order[at : at + whole] for at in range(0, samples, whole)]
        state, done = alone.state_dict(), 0
        for size, steps, _ in [*rounds, (4, 10**6, False)]:
            ranks = job.ranks(size, state)
            loaders = [torch.utils.data.DataLoader(values, batch_sampler=each) for each in ranks]
            iterators = [each.steps(loader) for each, loader in zip(ranks, loaders, strict=True)]
            for number, parts in enumerate(zip(*iterators, strict=True)):
                if number == steps:
                    break
                shares = [list(each) for each in parts]
                assert all(len(part.data) <= (micro or whole) for share in shares for part in share)
                assert all(
                    [part.last for part in share] == [False] * (len(share) - 1) + [True] for share in shares if share
                )
                samples_of = [int(value) for share in shares for part in share for value in part.data]
                assert sorted(samples_of) == sorted(wanted[done])
                mean = sum(float(part.data.mean()) * part.weight for share in shares for part in share) / size
                assert mean == pytest.approx(float(values[wanted[done]].mean()))
                done += 1
                for each in ranks:
                    each.record_step()
            state = ranks[0].state_dict()
        assert done == len(wanted)


def test_micro_batches_that_a_loop_leaves_out_do_not_shift_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    (sampler,) = Job(monkeypatch, lambda: GlobalBatchSampler(range(8), 4, 1, shuffle=False)).ranks(1)
    loader = torch.utils.data.DataLoader(torch.arange(8), batch_sampler=sampler)
    assert [next(step).data.item() for step in sampler.steps(loader)] == [0, 4]


def test_wrong_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    make: list[Any] = [lambda: GlobalBatchSampler(range(9), 0)]
    job = Job(monkeypatch, lambda: make[0]())
    with pytest.raises(ValueError, match="global_batch=0"):
        job.ranks(1)
    make[0] = lambda: GlobalBatchSampler(range(9), 4, 0)
    with pytest.raises(ValueError, match="micro_batch=0"):
        job.ranks(1)
    make[0] = lambda: GlobalBatchSampler(range(9), 2)
    with pytest.raises(ValueError, match="3 ranks need at least one sample each"):
        job.ranks(3)
    with pytest.raises(NotImplementedError, match="record_step"):
        job.ranks(2)[0].record_batch(0, 1)
