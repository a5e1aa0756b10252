"""Compressed allreduces with every engine that goes between hosts: how exact, the same bits everywhere, error feedback.

What each engine should compute is stated here in plain NumPy; the statement shares no code with the engines.
"""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines import ENGINES, group_of, run_ranks, sizes_of
from horovod.comm.base import Communicator
from horovod.comm.compression.blocks import BlockFormat
from horovod.comm.datatypes import Array
from horovod.comm.hierarchical.rank_grid import RankGrid
from part import draws

TYPES = [np.dtype(each) for each in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)]

COMPRESSING = [name for name in ENGINES if name.partition("-")[0] in {"tcp", "gloo", "ccl", "mpi", "hierarchical"}]


def groups(test: str, engines: Sequence[str] = COMPRESSING) -> list[tuple[str, int]]:
    """The engines and sizes of the groups that a test runs on."""
    return [(engine, size) for engine in engines for size in sizes_of(engine, test) if size >= 2]


untimed = settings(max_examples=draws(15), suppress_health_check=list(HealthCheck))


def rounded(values: Array, form: BlockFormat) -> Array:
    """Float32 numbers as they arrive, block by block."""
    found = np.empty(values.size, np.float32)
    for start in range(0, values.size, form.block):
        block = values[start : start + form.block]
        largest = np.abs(block).max()
        if np.isfinite(largest):
            scale = np.float32(largest * np.float32(1 / form.largest))
            codes = (
                np.rint(block * (np.float32(form.largest) / largest)) if largest else np.zeros(block.size, np.float32)
            )
            found[start : start + form.block] = codes.astype(np.int8).astype(np.float32) * scale
        else:
            found[start : start + form.block] = np.nan
    return found


def summed(inputs: Sequence[Array], form: BlockFormat) -> Array:
    """The sum of the float32 inputs of some ranks: each rank owns some blocks, adds what arrives, and sends the sum."""
    size, length = len(inputs), inputs[0].size
    blocks = -(-length // form.block)
    result = np.empty(length, np.float32)
    for owner in range(size):
        part = slice(*(min(length, blocks * bound // size * form.block) for bound in (owner, owner + 1)))
        total = inputs[owner][part].copy()
        for other in range(size):
            if other != owner:
                total += rounded(inputs[other][part], form)
        result[part] = rounded(total, form)
    return result


def reduced(
    group: Sequence[Communicator], batches: Sequence[Sequence[Array]], form: BlockFormat, *factors: float
) -> list[list[Array]]:
    """By rank, the results for that rank's batch."""

    def run(communicator: Communicator) -> list[Array]:
        inputs = batches[communicator.rank]
        outputs = [np.empty_like(each) for each in inputs]
        with np.errstate(all="ignore"):
            communicator.allreduce_compressed(inputs, outputs, *(factors or (1.0, 1.0)), form, [None] * len(inputs))
        return outputs

    return run_ranks(group, run)


def same_bits(first: Sequence[Array], second: Sequence[Array]) -> None:
    for one, other in zip(first, second, strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize(("engine", "size"), groups("same bits"))
def test_ranks_get_the_same_bits_alone_and_fused_and_the_error_is_bounded(engine: str, size: int) -> None:
    with group_of(engine, size) as group:

        @untimed
        @given(data=st.data())
        def run(data: st.DataObject) -> None:
            form = BlockFormat("some", data.draw(st.sampled_from([8, 4])), 2 * data.draw(st.integers(1, 70)))
            lengths = data.draw(st.lists(st.integers(0, 3000), min_size=1, max_size=4))
            dtype = data.draw(st.sampled_from(TYPES))
            random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
            bad = data.draw(st.sampled_from([None, None, np.nan, np.inf, -np.inf]))
            batches = [[(random.normal(size=length) * 100).astype(dtype) for length in lengths] for _ in range(size)]
            if bad is not None and lengths[0]:
                batches[random.integers(size)][0][random.integers(lengths[0])] = bad
            results = reduced(group, batches, form)
            for other in results[1:]:
                same_bits(other, results[0])
            for index in range(len(lengths)):
                alone = reduced(group, [[batch[index]] for batch in batches], form)
                same_bits(alone[-1], [results[0][index]])
            for index, result in enumerate(results[0]):
                exact = [batch[index].astype(np.float64) for batch in batches]
                within(result.astype(np.float64), exact, form, dtype)

        run()


def within(result: Array, inputs: Sequence[Array], form: BlockFormat, dtype: np.dtype) -> None:  # type: ignore[type-arg]
    """Each element is off by half a scale for each contribution and for the sum, and by roundings of the type. A number that is
    not finite makes its block NaN, or, beside other hosts, at most this one."""
    exact = np.sum(inputs, axis=0)
    for start in range(0, exact.size, form.block):
        block = slice(start, start + form.block)
        if not np.isfinite(exact[block]).all():
            assert np.isnan(result[block][~np.isfinite(exact[block])]).all()
            continue
        magnitudes = sum(np.abs(each[block]).max() for each in inputs)
        bound = magnitudes / form.largest + magnitudes * 4 * float(
            ml_dtypes.finfo(dtype).eps if dtype != np.float64 else 1e-6
        )
        assert (np.abs(result[block] - exact[block]) <= bound).all()


@pytest.mark.parametrize(("engine", "size"), groups("statement"))
def test_results_are_those_of_the_statement_whichever_engine_moves_the_blocks(engine: str, size: int) -> None:
    form, random = BlockFormat("some", 8, 64), np.random.default_rng(1)
    lengths = [70_001, 5, 0, 12_800]
    batches = [[random.normal(size=length).astype(np.float32) for length in lengths] for _ in range(size)]
    hosts = ENGINES[engine].hosts(size)
    with group_of(engine, size) as group:
        found = reduced(group, batches, form, 1.0, 0.5)
    for index, result in enumerate(found[0]):
        inputs = [batch[index] for batch in batches]
        if hosts:
            within(
                result.astype(np.float64) * 2, [each.astype(np.float64) for each in inputs], form, np.dtype(np.float32)
            )
        else:
            np.testing.assert_array_equal(result, summed(inputs, form) * np.float32(0.5))
    for other in found[1:]:
        same_bits(other, found[0])


@pytest.mark.parametrize(
    ("engine", "size"), groups("error feedback", [each for each in COMPRESSING if "mpi" not in each])
)
@pytest.mark.parametrize("bits", [8, 4])
def test_with_error_feedback_the_results_of_many_steps_add_up_to_the_sum(engine: str, size: int, bits: int) -> None:
    form, random, steps = BlockFormat("some", bits, 64), np.random.default_rng(2), 40
    lengths = [3001, 640]
    inputs = [[random.normal(size=length).astype(np.float32) for length in lengths] for _ in range(size)]
    exact = [np.sum([rank[index].astype(np.float64) for rank in inputs], axis=0) for index in range(2)]

    def train(communicator: Communicator) -> list[list[Array]]:
        errors: list[Array | None] = [np.zeros(length, np.float32) for length in lengths]
        found = []
        for step in range(steps):
            given = inputs[communicator.rank]
            outputs = [np.empty_like(each) for each in given]
            # In every other step the vectors travel one by one: the batch changes nothing.
            for part in [slice(0, 2)] if step % 2 else [slice(0, 1), slice(1, 2)]:
                communicator.allreduce_compressed(given[part], outputs[part], 1.0, 1.0, form, errors[part])
            found.append(outputs)
        return found

    with group_of(engine, size) as group:
        results = run_ranks(group, train)
    for rank in results[1:]:
        for step, other in zip(results[0], rank, strict=True):
            same_bits(other, step)
    for index in range(2):
        total = np.sum([step[index].astype(np.float64) for step in results[0]], axis=0)
        one = np.abs(results[0][0][index] - exact[index]).max()
        # What is left is the error of one step, not of forty.
        assert np.abs(total - steps * exact[index]).max() <= 4 * one


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_that_is_not_finite_leaves_no_error_behind_and_that_of_other_blocks_stays(bad: float) -> None:
    form = BlockFormat("some", 8, 4)
    with group_of("tcp", 2) as group:

        def run(communicator: Communicator, places: Sequence[int]) -> tuple[Array, Array]:
            errors: list[Array | None] = [np.zeros(48, np.float32)]
            vector = np.arange(48, dtype=np.float32) * 0.3
            if places:
                vector[places[communicator.rank]] = bad
            with np.errstate(all="ignore"):
                communicator.allreduce_compressed([vector], [vector], 1.0, 1.0, form, errors)
            assert errors[0] is not None
            return vector.reshape(-1, form.block), errors[0].reshape(-1, form.block)

        usual = run_ranks(group, lambda communicator: run(communicator, []))

        @untimed
        @given(places=st.tuples(st.integers(0, 47), st.integers(0, 47)))
        def check(places: tuple[int, int]) -> None:
            found = run_ranks(group, lambda communicator: run(communicator, places))
            same_bits([found[0][0]], [found[1][0]])
            lost = {place // form.block for place in places}
            kept = [index for index in range(48 // form.block) if index not in lost]
            for (result, error), (usual_result, usual_error) in zip(found, usual, strict=True):
                assert set(np.flatnonzero(np.isnan(result).all(axis=1)).tolist()) == lost and np.isfinite(error).all()
                same_bits([result[kept], error[kept]], [usual_result[kept], usual_error[kept]])

        check()


def test_shares_of_a_host_begin_with_a_block() -> None:
    grid = RankGrid.of("aaabbb", 1)
    assert grid.shares(10, block=4) == [4, 4, 2]
    assert grid.shares(3, block=4) == [0, 0, 3]
