"""Adasum over every engine and number of ranks, against a plain statement of its formula in float64.

The statement below is the specification; it shares no code with the implementation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import horovod.comm.adasum as module
from engines import group_of, run_ranks
from horovod.comm.adasum import adasum, can_combine
from horovod.comm.base import Communicator
from horovod.comm.datatypes import FLOATING, Array, DataType

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LENGTHS = [1, 5, 1000, 0, 33_001]
TOLERANCE = {"float64": 1e-14, "float32": 1e-6, "float16": 2**-10, "bfloat16": 2**-7}
"""Relative to the largest element: a few roundings in the type, one in 16-bit types, where two values may be as near."""

# What is right


def adasum_of_two(a: Array, b: Array) -> Array:
    """Two ranks' tensors."""
    of_a = 1 - a.dot(b) / (2 * a.dot(a)) if a.any() else 1.0
    of_b = 1 - a.dot(b) / (2 * b.dot(b)) if b.any() else 1.0
    return of_a * a + of_b * b


def statement(contributions: Sequence[Array]) -> Array:
    """All ranks' tensors: neighbours combine, the last of an odd number goes up as it is."""
    level = [contribution.astype(np.float64) for contribution in contributions]
    while len(level) > 1:
        level = [adasum_of_two(*level[i : i + 2]) if i + 1 < len(level) else level[i] for i in range(0, len(level), 2)]
    return level[0]


@lru_cache(maxsize=1024)
def values(dtype: Any, length: int, rank: int) -> Array:
    """What a rank contributes. A common part makes the dot products matter; norms differ between ranks."""
    common = np.random.default_rng(length).standard_normal(length)
    own = np.random.default_rng([length, rank]).standard_normal(length)
    array = ((common + own) * 2.0 ** (rank % 3)).astype(dtype)
    array.flags.writeable = False
    return array


def close(found: Array, wanted: Array) -> bool:
    bound = TOLERANCE[found.dtype.name] * max(np.abs(wanted).max(initial=0.0), 1e-30) * 4
    return bool(np.abs(found.astype(np.float64) - wanted).max(initial=0.0) <= bound)


def everywhere(
    group: Sequence[Communicator], batches: Sequence[Sequence[Array]], prescale: float = 1.0, postscale: float = 1.0
) -> list[Array]:
    """Adasum of one batch (``batches[rank]``); the results, after seeing that every rank has the same bits."""

    def run(communicator: Communicator) -> list[Array]:
        batch = batches[communicator.rank]
        outputs = [np.full_like(array, 77) for array in batch]
        adasum(communicator, batch, outputs, prescale, postscale)
        return outputs

    first, *others = run_ranks(group, run)
    for other in others:
        assert [array.tobytes() for array in other] == [array.tobytes() for array in first]
    return first


GROUPS = [
    *((engine, size) for engine in ("shm", "tcp") for size in range(2, 9)),
    ("shm-small-pieces", 3),
    ("tcp-small-pieces", 3),
    ("single", 1),
]


@pytest.fixture(scope="module", params=GROUPS, ids=lambda group: f"{group[0]}-{group[1]}")
def group(request: pytest.FixtureRequest) -> Iterator[list[Communicator]]:
    with group_of(*request.param) as communicators:
        yield communicators


def test_the_formula_alone_and_fused(group: list[Communicator]) -> None:
    ranks = range(len(group))
    for data_type in sorted(FLOATING):
        dtype = data_type.numpy
        batches = [[values(dtype, length, rank) for length in LENGTHS] for rank in ranks]
        fused = everywhere(group, batches)
        for index, length in enumerate(LENGTHS):
            contributions = [batch[index] for batch in batches]
            assert close(fused[index], statement(contributions)), (data_type.label, length)
            (alone,) = everywhere(group, [[contribution] for contribution in contributions])
            assert alone.tobytes() == fused[index].tobytes(), (data_type.label, length)


def test_in_place_and_scaled(group: list[Communicator]) -> None:
    ranks = range(len(group))
    for dtype in (np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)):
        batches = [[values(dtype, length, rank) for length in LENGTHS] for rank in ranks]
        scaled = everywhere(group, batches, 0.5, 3.0)
        for index, array in enumerate(scaled):
            assert close(array, 1.5 * statement([batch[index] for batch in batches])), (dtype, LENGTHS[index])

        def in_place(communicator: Communicator, batches: Any = batches) -> list[Array]:
            batch = [array.copy() for array in batches[communicator.rank]]
            adasum(communicator, batch, batch, 0.5, 3.0)
            return batch

        for batch in run_ranks(group, in_place):
            assert [array.tobytes() for array in batch] == [array.tobytes() for array in scaled]


def test_equal_vectors_stay_and_orthogonal_ones_add(group: list[Communicator]) -> None:
    size = len(group)
    equal = values(np.dtype(np.float64), 1000, 0)
    (found,) = everywhere(group, [[equal]] * size)
    assert close(found, equal)
    orthogonal = [np.zeros(800) for _ in group]
    for rank, array in enumerate(orthogonal):
        array[rank::size] = rank + 1.0
    (found,) = everywhere(group, [[array] for array in orthogonal])
    assert close(found, np.sum(orthogonal, axis=0))
    (found,) = everywhere(group, [[equal if rank == size - 1 else np.zeros(1000)] for rank in range(size)])
    assert found.tobytes() == equal.tobytes()  # zeros have no say
    (found,) = everywhere(group, [[np.zeros(7)]] * size)
    assert not found.any()


@pytest.mark.parametrize("engine", ["shm", "tcp"])
@pytest.mark.parametrize("size", range(2, 9))
def test_parallel_vectors_average_where_the_tree_is_even(engine: str, size: int) -> None:
    direction = values(np.dtype(np.float64), 1000, 0)
    with group_of(engine, size) as group:
        (found,) = everywhere(group, [[(rank + 1) * direction] for rank in range(size)])
    weights = [1.0 * (rank + 1) for rank in range(size)]  # neighbours average level by level, an odd one waits
    while len(weights) > 1:
        weights = [float(np.mean(weights[i : i + 2])) for i in range(0, len(weights), 2)]
    assert close(found, weights[0] * direction)
    if size in (2, 4, 8):
        assert weights[0] == (size + 1) / 2


def swaps(size: int) -> list[list[int]]:
    """Permutations of ranks that exchange what combines with each other: siblings at any level of the tree."""
    found, level = [], [[rank] for rank in range(size)]
    while len(level) > 1:
        merged = []
        for i in range(0, len(level), 2):
            pair = level[i : i + 2]
            if len(pair) == 2 and len(pair[0]) == len(pair[1]):
                exchanged = list(range(size))
                for one, two in zip(*pair, strict=True):
                    exchanged[one], exchanged[two] = two, one
                found.append(exchanged)
            merged.append([rank for part in pair for rank in part])
        level = merged
    return found


@pytest.mark.parametrize("size", range(2, 9))
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16], ids=str)
def test_symmetry(size: int, dtype: Any) -> None:
    """Siblings can be exchanged without changing a bit; a rank that goes up unchanged cannot."""
    contributions = [[values(dtype, 1000, rank)] for rank in range(size)]
    with group_of("shm", size) as group:
        (base,) = everywhere(group, contributions)
        for permutation in swaps(size):
            (found,) = everywhere(group, [contributions[rank] for rank in permutation])
            assert found.tobytes() == base.tobytes(), permutation
        if size > 2:
            (found,) = everywhere(group, [contributions[-1], *contributions[1:-1], contributions[0]])
            assert found.tobytes() != base.tobytes()


def test_portions_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [300, 0, 900, 5000, 1, 0, 2, 1000, 0]  # in portions of 4 KB: several tensors, and one larger than that
    batches = [[values(np.dtype(np.float32), length, rank) for length in lengths] for rank in range(3)]
    with group_of("shm", 3) as group:
        whole = everywhere(group, batches)
        monkeypatch.setattr(module, "PORTION_BYTES", 4096)
        assert len(list(module._portions(batches[0]))) == 4
        for one, two in zip(whole, everywhere(group, batches), strict=True):
            assert one.tobytes() == two.tobytes()
        assert everywhere(group, [[np.zeros(0, np.float32)]] * 3)[0].size == 0


def test_an_infinite_element_spoils_its_own_tensor_only() -> None:
    batches = [[values(np.dtype(np.float32), length, rank).copy() for length in (100, 200)] for rank in range(3)]
    batches[1][0][50] = np.inf
    with group_of("tcp", 3) as group, np.errstate(all="ignore"):

        def run(communicator: Communicator) -> list[Array]:
            with np.errstate(all="ignore"):  # as in a worker thread
                adasum(communicator, batches[communicator.rank], batches[communicator.rank], 1.0, 1.0)
            return batches[communicator.rank]

        wanted = statement([batch[1] for batch in batches])
        for spoilt, sound in run_ranks(group, run):
            assert np.isnan(spoilt).all()
            assert close(sound, wanted)


def test_tiny_and_huge_vectors() -> None:
    """Squared norms that float32 cannot hold."""
    for factor in (1e-25, 1e25):
        batches = [[values(np.dtype(np.float32), 1000, rank) * np.float32(factor)] for rank in range(2)]
        with group_of("shm", 2) as group:
            (found,) = everywhere(group, batches)
        assert close(found, statement([batch[0] for batch in batches]))


def test_what_adasum_combines() -> None:
    assert {data_type for data_type in DataType if can_combine(data_type)} == set(FLOATING)
