"""Arrays cross without copies, of every type and of both kinds."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest

from horovod.mxnet.ops.arrays import (
    DATA_TYPES,
    check,
    empty,
    flat,
    on_host,
    readable,
    to_devices_of,
    variable,
    view,
    writable,
)


@pytest.mark.parametrize("kind", DATA_TYPES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("make", [mx.nd.array, mx.np.array])
def test_a_view_is_the_memory_of_the_array_with_its_type_and_shape(make: Any, kind: type) -> None:
    source = make([[1, 2, 3], [4, 5, 6]], dtype=kind)
    source.wait_to_read()
    seen = view(source)
    assert seen.data_type is DATA_TYPES[kind] is check(source, "x") and seen.shape == (2, 3)
    assert seen.array.dtype == kind and seen.array.tolist() == [1, 2, 3, 4, 5, 6]
    seen.array[0] = 9
    assert source.asnumpy()[0, 0] == 9, "it is the memory itself"
    made = empty((4, 2), source)
    assert type(made) is type(source) and made.shape == (4, 2) and np.dtype(made.dtype) == kind
    flat(made)[:] = 7
    assert np.all(made.asnumpy() == 7)


def test_arrays_without_elements_keep_their_shape_and_type() -> None:
    for shape in ((0,), (0, 3), (2, 0)):
        made = empty(shape, mx.nd.ones((1,), dtype="int8"))
        assert made.shape == shape and flat(made).size == 0 and flat(made).dtype == np.int8


def test_views_of_one_array_have_one_variable_in_the_engine() -> None:
    x, y = mx.nd.arange(6), mx.nd.arange(6)
    assert variable(x) == variable(x[2:4]) == variable(x.reshape((2, 3))) != variable(y)
    mx.nd.waitall()
    assert flat(x[2:4]).tolist() == [2.0, 3.0]


def test_arrays_that_onednn_has_laid_out_anew_are_read_and_written_in_plain_order() -> None:
    convolution = mx.gluon.nn.Conv2D(32, 3, in_channels=16, use_bias=False)
    convolution.initialize(mx.init.Uniform(1.0))
    inputs = mx.nd.random.uniform(shape=(1, 16, 8, 8))

    def result() -> Any:
        made = convolution(inputs)
        mx.nd.waitall()  # asnumpy() would change the layout
        return made

    wanted = result().asnumpy().ravel()
    raw = result()
    assert flat(readable(raw)).tolist() == wanted.tolist()
    assert np.array_equal(raw.asnumpy().ravel(), wanted)
    changed = result()
    assert writable(changed) is changed and flat(changed).tolist() == wanted.tolist()
    flat(changed)[:] = 1
    assert np.all(changed.asnumpy() == 1)


def test_what_cannot_be_communicated_is_refused_with_the_reason() -> None:
    sparse = mx.nd.sparse.zeros("row_sparse", (2, 2))
    for wrong, text in (
        (np.ones(2), r"x: expected an mxnet\.nd\.NDArray, not ndarray"),
        (mx.nd.ones((2,)).astype("bool"), "x: elements of type bool cannot be communicated; supported are float32"),
        (sparse, r"sparse arrays \(row_sparse\)"),
    ):
        with pytest.raises(ValueError, match=text):
            check(wrong, "x")


def test_arrays_in_host_memory_stay_where_they_are() -> None:
    arrays = [mx.nd.ones((2,)), mx.nd.ones((2,), ctx=mx.cpu_pinned()), mx.nd.ones((2,), ctx=mx.cpu(1))]
    assert all(found is given for found, given in zip(on_host(arrays), arrays, strict=True))
    assert all(found is given for found, given in zip(to_devices_of(arrays, arrays), arrays, strict=True))
