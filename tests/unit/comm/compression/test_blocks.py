"""Blocks of floating-point numbers as codes: how exact they are, and what becomes of numbers that have no code."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from horovod.comm.compression.blocks import FORMATS, LEAST, LEAST_ELEMENTS, MOST, BlockCoder, BlockFormat, can_compress
from horovod.comm.datatypes import Array, DataType

FORMS = st.builds(
    lambda bits, half: BlockFormat("some", bits, 2 * half),
    st.sampled_from([8, 4]),
    st.integers(min_value=1, max_value=40),
)


def through(form: BlockFormat, values: Array) -> tuple[Array, Array]:
    """What the sender keeps as sent, and what a receiver reads."""
    coder, packed = BlockCoder(form), np.empty(form.nbytes(len(values)), np.uint8)
    read = np.empty_like(values)
    with np.errstate(all="ignore"):  # as on a worker thread
        sent = coder.pack(values, packed)[0].copy()
        BlockCoder(form).unpack(packed, read)
    return sent, read


@given(form=FORMS, blocks=st.integers(1, 20), seed=st.integers(0, 2**32 - 1), exponent=st.integers(-30, 30))
@example(form=BlockFormat("some", 8, 52), blocks=4, seed=479001601, exponent=-26)  # 78.4999997 scales
def test_an_element_is_off_by_half_a_scale_at_most(form: BlockFormat, blocks: int, seed: int, exponent: int) -> None:
    random = np.random.default_rng(seed)
    spread = np.exp(random.normal(size=(blocks, 1)) * 3)  # blocks of different magnitudes
    values = (random.normal(size=(blocks, form.block)) * spread * 10.0**exponent).astype(np.float32)
    before = values.copy()
    sent, read = through(form, values)
    np.testing.assert_array_equal(values, before)
    np.testing.assert_array_equal(sent.view(np.uint32), read.view(np.uint32))
    exact = values.astype(np.float64)
    bound = np.abs(exact).max(axis=1, keepdims=True) / form.largest / 2
    rounded = np.abs(exact) * 2.0**-22  # the scale, its inverse, the quotient and the product, in float32
    assert (np.abs(read - exact) <= bound + rounded).all()


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_codes_use_the_whole_range_and_both_signs_alike(form: BlockFormat) -> None:
    values = np.linspace(-1, 1, form.block, dtype=np.float32)[None]
    _, read = through(form, values)
    assert len(np.unique(read)) == min(form.block, 2 * form.largest + 1)
    assert read[0, 0] == pytest.approx(-1) and read[0, -1] == pytest.approx(1)
    _, mirrored = through(form, -values)
    np.testing.assert_array_equal(mirrored, -read)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_block_with_a_number_that_is_not_finite_is_nan_and_no_other(form: BlockFormat, bad: float) -> None:
    values = np.ones((4, form.block), np.float32)
    values[2, 1] = bad
    sent, read = through(form, values)
    for found in (sent, read):
        assert np.isnan(found[2]).all()
        assert np.isfinite(found[[0, 1, 3]]).all()


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_the_smallest_and_the_largest_numbers(form: BlockFormat) -> None:
    values = np.zeros((5, form.block), np.float32)
    values[1] = LEAST / 2
    values[2] = LEAST * 2
    values[3] = MOST / 1.01
    values[4] = np.finfo(np.float32).max
    _, read = through(form, values)
    assert (read[:2] == 0).all()
    np.testing.assert_allclose(read[2:4], values[2:4], rtol=1e-6)
    assert np.isnan(read[4]).all()


def test_a_quarter_and_an_eighth_of_float32_travel() -> None:
    elements = 1 << 20
    sizes = {name: form.nbytes(form.blocks(elements)) / (4 * elements) for name, form in FORMATS.items()}
    assert sizes == {"int8": pytest.approx(0.25, abs=0.005), "int4": pytest.approx(0.125, abs=0.02)}


def test_only_long_tensors_of_floating_point_numbers_are_compressed() -> None:
    compressed = {each.label for each in DataType if can_compress(each, LEAST_ELEMENTS)}
    assert compressed == {"float16", "bfloat16", "float32", "float64"}
    assert not any(can_compress(each, LEAST_ELEMENTS - 1) for each in DataType)
