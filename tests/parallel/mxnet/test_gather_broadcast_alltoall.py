"""allgather, broadcast, alltoall: every type and odd arguments."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest

import horovod.mxnet as hvd
from horovod.mxnet.ops.arrays import DATA_TYPES

TYPES = [np.dtype(kind) for kind in DATA_TYPES]


def rows(rank: int, number: int, dtype: Any) -> np.ndarray[Any, Any]:
    return (np.arange(number * 3).reshape(number, 3) + 10 * rank).astype(dtype)


def test_allgather_concatenates_rows_of_different_lengths_in_rank_order(job: Any) -> None:
    def check() -> None:
        me, size = hvd.rank(), hvd.size()
        for dtype in TYPES:
            wanted = np.concatenate([rows(rank, rank + 1, dtype) for rank in range(size)])
            for make in (mx.nd.array, mx.np.array):
                mine = make(rows(me, me + 1, dtype), dtype=dtype)
                found = hvd.allgather(mine)
                assert type(found) is type(mine) and np.dtype(found.dtype) == dtype
                assert np.array_equal(found.asnumpy(), wanted)
        with mx.util.np_shape(True):  # else MXNet takes a 0 in a shape for "not known yet"
            some = hvd.allgather(mx.np.ones((0 if me else 2, 3)))
            assert some.shape == (2, 3) and hvd.allgather(mx.np.ones((0, 3))).shape == (0, 3)
        group = hvd.grouped_allgather([mx.nd.ones((me + 1,)), mx.nd.array([me], dtype="int64")], name="group")
        assert group[0].shape == (6,) and group[1].asnumpy().tolist() == [0, 1, 2]

    job(3, check)


def test_allgather_asserts_an_ndarray(job: Any) -> None:
    def check() -> None:
        for wrong in (np.ones(2), [1.0], 3.0, None):
            with pytest.raises(AssertionError, match=r"expects an mxnet\.nd\.NDArray"):
                hvd.allgather(wrong)
            with pytest.raises(AssertionError, match=r"expects an mxnet\.nd\.NDArray"):
                hvd.grouped_allgather([wrong])

    job(1, check)


@pytest.mark.parametrize("size", [1, 3])
def test_broadcast_sends_the_array_of_the_root(job: Any, size: int) -> None:
    def check() -> None:
        me = hvd.rank()
        for dtype in TYPES:
            for root in (0, size - 1, np.int64(size - 1)):
                for make in (mx.nd.array, mx.np.array):
                    mine = make(rows(me, 2, dtype), dtype=dtype)
                    found = hvd.broadcast(mine, root)
                    assert type(found) is type(mine) and np.array_equal(found.asnumpy(), rows(int(root), 2, dtype))
                    assert np.array_equal(mine.asnumpy(), rows(me, 2, dtype))
                    assert hvd.broadcast_(mine, root, name="in place") is mine
                    assert np.array_equal(mine.asnumpy(), rows(int(root), 2, dtype))
        with mx.util.np_shape(True):
            scalar = hvd.broadcast(mx.np.array(float(me)), size - 1)
            assert scalar.shape == () and float(scalar) == size - 1

    job(size, check)


def test_alltoall_sends_rows_to_every_rank(job: Any) -> None:
    def check() -> None:
        me, size = hvd.rank(), hvd.size()
        for dtype in TYPES:
            even = hvd.alltoall(mx.nd.array(rows(me, size, dtype), dtype=dtype))
            assert np.array_equal(even.asnumpy(), np.stack([rows(rank, size, dtype)[me] for rank in range(size)]))
        splits = [0, 1, 3]  # one row is left over
        wanted = np.concatenate(
            [rows(rank, 5, "float32")[sum(splits[:me]) : sum(splits[: me + 1])] for rank in range(3)]
        )
        for given in (
            splits,
            tuple(splits),
            np.array(splits),
            mx.nd.array(splits, dtype="int32"),
            [np.int64(s) for s in splits],
        ):
            for make in (mx.nd.array, mx.np.array):
                mine = make(rows(me, 5, "float32"), dtype="float32")
                output, received = hvd.alltoall(mine, splits=given)
                assert type(output) is type(received) is type(mine)
                assert np.array_equal(output.asnumpy(), wanted) and output.shape == (3 * splits[me], 3)
                assert np.dtype(received.dtype) == np.int32 and received.asnumpy().tolist() == [splits[me]] * 3

    job(3, check)


def test_splits_that_make_no_sense_are_refused_and_the_job_goes_on(job: Any) -> None:
    def check() -> None:
        x = mx.nd.ones((3, 2))
        for splits, text in {
            (1, 1, 1): "Number of entries in splits does not equal number of workers",
            (2, 2): "Sum of splits entries is greater than the first dimension of tensor",
            (-1, 1): "must not be negative",
            (1.5, 1): "expected a whole number",
        }.items():
            with pytest.raises(ValueError, match=text):
                hvd.alltoall(x, splits=splits)
        with pytest.raises(ValueError, match="not an even multiple of the number of workers"):
            hvd.alltoall(x)
        with pytest.raises(ValueError, match="expects a 1D splits tensor"):
            hvd.alltoall(x, splits=mx.nd.ones((2, 1), dtype="int32"))
        with pytest.raises(ValueError, match="32-bit integer elements, not float32"):
            hvd.alltoall(x, splits=mx.nd.ones((2,)))
        with pytest.raises(ValueError, match="1D splits tensor or a list"):
            hvd.alltoall(x, splits=3)
        assert hvd.allreduce(x, op=hvd.Sum).asnumpy()[0, 0] == 2.0

    job(2, check)
