"""Samples that ranks compare in each step: a difference is found, rounding is none, nor is what cannot be compared."""

from __future__ import annotations

import math
import random
import warnings
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.comm.datatypes import Array
from horovod.comparison import alike, samples
from horovod.comparison.comparison import NOTHING
from horovod.comparison.looks import (
    TENSORS,
    Looks,
    Part,
    Seen,
    apart,
    looks_at,
    looks_in,
    place_of,
    tag_of,
    tensors_in_step,
)
from horovod.comparison.precision import Precision
from horovod.comparison.samples import LOOKS, Samples, SentLooks, StepLooks
from horovod.core.errors import MismatchError

SPECIAL = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e300, -1e300, math.inf, -math.inf, math.nan])


@given(st.lists(st.tuples(SPECIAL, SPECIAL, SPECIAL), min_size=1, max_size=4))
def test_the_distance_of_any_numbers_is_that_of_the_largest_and_the_smallest(rows: list[tuple[float, ...]]) -> None:
    found = apart(np.array(rows), Precision.DOUBLE)
    assert found >= 0
    columns = [*zip(*rows, strict=True)]
    if all(len({repr(each) for each in column}) == 1 for column in columns):
        assert found == 0
    for column in columns:
        finite = [each for each in column if math.isfinite(each)]
        if len(finite) < len({repr(each) for each in column}) and finite and max(map(abs, finite)) <= 1:
            assert found == math.inf  # only one of them is finite
    assert found == apart(np.array(rows[::-1]), Precision.DOUBLE)


def seen(values: Array) -> Array:
    return looks_at([Part(16, "weight", values, 3)]).values[0]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 10**6))
def test_looks_at_several_tensors_are_those_at_each(counts: list[int], seed: int) -> None:
    draw = np.random.default_rng(seed)
    parts = [
        Part(tag, f"weight {tag}", draw.standard_normal(count).astype(draw.choice(["f2", "f4", "f8"])), tag * 7)
        for tag, count in enumerate(counts)
    ]
    found = looks_at(parts)
    assert found.tags == [part.tag for part in parts] and found.labels == [part.label for part in parts]
    for part, (element, *others) in zip(parts, found.values, strict=True):
        values = part.values.astype(np.float64)
        assert element == values[part.place % len(values)]
        assert np.allclose(others, [values.mean(), np.sqrt(np.square(values).mean())], rtol=1e-12, atol=1e-15)


@given(st.integers(1, 3000), st.integers(0, 10**6), st.integers(0, 1 << 56))
def test_each_tensor_has_its_turn_in_time(tensors: int, first: int, optimizer: int) -> None:
    seen = 0
    for step in range(first, first + max(50, tensors // 2)):
        found = tensors_in_step(step, optimizer, tensors)
        assert 0 <= found <= TENSORS and bool(found) == looks_in(step, optimizer)
        seen += found
    assert seen >= tensors


def distance(one: Array, other: Array, precision: Precision) -> float:
    return apart(np.array([seen(one), seen(other)]), precision)


@given(st.integers(0, 10**6), st.integers(1, 1000), st.floats(-100, 30), st.sampled_from([np.float32, np.float64]))
def test_what_is_rounded_otherwise_is_no_difference(seed: int, count: int, magnitude: float, kind: Any) -> None:
    draw = np.random.default_rng(seed)
    values = (draw.standard_normal(count) * 2.0**magnitude).astype(kind)
    rounded = (values * (1 + 30 * np.finfo(kind).eps * draw.standard_normal(count))).astype(kind)
    precision = Precision.SINGLE if kind is np.float32 else Precision.DOUBLE
    assert distance(values, rounded, precision) <= precision.relative


@given(st.integers(0, 10**6), st.integers(1, 1000), st.sampled_from(["scaled", "noise", "one row", "nan"]))
def test_what_differs_is_found(seed: int, count: int, how: str) -> None:
    draw = np.random.default_rng(seed)
    values = draw.standard_normal(count)
    other = values.copy()
    if how == "scaled":
        other *= 0.99
    elif how == "noise":
        other += draw.choice([-0.1, 0.1]) * draw.uniform(0.5, 1.5, count)
    elif how == "one row":
        other[: max(1, count // 100)] += 3.0
    else:
        other[draw.integers(count)] = np.nan
    assert distance(values, other, Precision.SINGLE) > Precision.SINGLE.relative


@dataclass
class Rank:
    """One rank's part in simulated agreements."""

    number: int
    samples: Samples = field(default_factory=lambda: Samples(0))
    said: list[str] = field(default_factory=list)


def agree(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch, error: bool = True) -> list[str]:
    """One agreement of the ranks that take part; what each was told."""
    sent = {rank.number: rank.samples.taken() for rank in ranks}
    if len({each.digest for each in sent.values()} - {NOTHING}) < 2:
        return [""] * len(ranks)
    rows = {number: each.encode() for number, each in sent.items()}
    told = []
    for rank in ranks:
        context = SimpleNamespace(
            joins=0, config=SimpleNamespace(check="error" if error else "warn"), identity=SimpleNamespace(rank=0)
        )
        monkeypatch.setattr(alike, "running", lambda context=context: context)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                rank.samples.judge(rows)
            told.append("".join(str(each.message) for each in caught))
        except MismatchError as found:
            told.append(str(found))
    return told


@pytest.fixture(autouse=True)
def generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "running", lambda: SimpleNamespace(joins=0, generation=1))


def offered(
    rank: Rank, name: str, step: int, value: float, parameter: bool = False, count: int = 1, late: bool = False
) -> None:
    owner = rank.samples.owner(name, f"the optimizer {name}")
    looks = Looks(
        [tag_of(Precision.SINGLE, parameter, owner.number, step, n) for n in range(count)],
        [f"{name}.{n}" for n in range(count)],
        np.array([[value, value / 2, 1.0]] * count),
    )
    seen = Seen(count, looks.values.tobytes(), lambda: looks)
    rank.samples.offer(StepLooks(owner, step, 4, lambda: seen, late))


def test_all_ranks_are_told_the_parameter_the_step_the_ranks_and_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [Rank(0), Rank(1), Rank(2)]
    for rank in ranks:
        offered(rank, "net", 7, 0.25 + (rank.number == 2))
    texts = agree(ranks, monkeypatch)
    assert len(set(texts)) == 1
    assert "gradients of the ranks differ" in texts[0] and "in step 7 of the optimizer net" in texts[0]
    assert "'net.0' is 0.25 on ranks 0, 1, 1.25 on rank 2" in texts[0]


def test_what_is_read_from_a_device_is_compared_one_agreement_later(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [Rank(0), Rank(1)]
    for rank in ranks:
        offered(rank, "net", 7, 0.25 + rank.number, late=True)
    assert agree(ranks, monkeypatch) == ["", ""]
    assert all("in step 7 of the optimizer net" in text for text in agree(ranks, monkeypatch))
    assert agree(ranks, monkeypatch) == ["", ""]


def test_ranks_that_do_not_step_or_are_at_other_steps_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [Rank(0), Rank(1), Rank(2)]
    offered(ranks[0], "net", 7, 0.25)
    offered(ranks[1], "net", 8, 0.75)
    assert agree(ranks, monkeypatch) == ["", "", ""]


def test_a_rank_that_has_looked_at_other_things_hides_no_difference_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = [Rank(0), Rank(1), Rank(2)]
    for rank in ranks:
        offered(rank, "net", 7, 0.25 + (rank.number == 1))
    offered(ranks[2], "other", 7, 0.5)
    ranks[2].samples.drop("net")
    texts = agree(ranks, monkeypatch)
    assert len({*texts}) == 1 and "'net.0' is 0.25 on rank 0, 1.25 on rank 1." in texts[0]


def test_looks_are_computed_only_if_ranks_have_seen_different_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def looks() -> Looks:
        raise AssertionError("computed")

    ranks = [Rank(0), Rank(1)]
    for rank in ranks:
        seen = Seen(1, b"the same", looks)
        rank.samples.offer(StepLooks(rank.samples.owner("net", "net"), 1, 4, lambda seen=seen: seen))
    assert agree(ranks, monkeypatch) == ["", ""]


def test_parameters_that_drift_apart_slowly_are_only_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [Rank(0), Rank(1)]
    for step in range(1, 40):
        for rank in ranks:
            offered(rank, "net", step, 0.25 + rank.number * 2e-5 * step, parameter=True)
        texts = agree(ranks, monkeypatch)
        if any(texts):
            break
    assert "slowly diverge" in "".join(texts) and "HOROVOD_CHECK=off" in "".join(texts)


def test_what_changes_at_once_is_no_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [Rank(0), Rank(1)]
    for step in range(1, 5):
        for rank in ranks:
            offered(rank, "net", step, 0.25 + rank.number * (1e-7 if step < 4 else 0.1), parameter=True)
        texts = agree(ranks, monkeypatch)
    assert "have diverged in step 4" in texts[0] and texts[0] == texts[1]


@given(st.integers(0, 10**6))
def test_random_histories_of_ranks_that_hold_the_same_tell_nothing(seed: int) -> None:
    choose = random.Random(seed)
    with pytest.MonkeyPatch.context() as monkeypatch:
        ranks = [Rank(number) for number in range(choose.choice((2, 3, 5)))]
        steps = {rank.number: 0 for rank in ranks}
        for _ in range(12):
            for rank in ranks:
                for name in choose.sample(["a", "b", "c"], choose.randrange(4)):
                    steps[rank.number] += choose.random() < 0.7
                    step = steps[rank.number]
                    value = 0.001 * (step * 37 % 101)
                    offered(rank, name, step, value, choose.random() < 0.5, choose.choice((1, 2, 4)))
                if choose.random() < 0.1:
                    rank.samples.drop(choose.choice("abc"))
            present = [rank for rank in ranks if choose.random() < 0.8] or ranks[:1]
            assert not any(agree(present, monkeypatch))


def test_of_many_optimizers_each_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, found = Rank(0), set()
    for step in range(200):
        for number in range(20):
            offered(rank, f"net{number}", step, 0.5, count=4)
        sent = rank.samples.taken()
        assert 0 < sum(seen.amount for _, seen in sent.seen) <= LOOKS
        found |= {offer.owner.name for offer, _ in sent.seen}
    assert len(found) == 20 and rank.samples.taken() == SentLooks()


def test_places_differ_from_step_to_step() -> None:
    assert len({place_of(step, number) % 1000 for step in range(20) for number in range(20)}) > 300
