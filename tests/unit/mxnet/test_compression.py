"""What travels, and what comes back."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest

import horovod.mxnet as hvd


@pytest.mark.parametrize("make", [mx.nd.array, mx.np.array])
def test_floats_are_halved_and_others_stay(make: object) -> None:
    for dtype, travels in {"float32": "float16", "float64": "float16", "float16": "float16", "int32": "int32"}.items():
        source = make([1, 2], dtype=dtype)  # type: ignore[operator]  # one of MXNet's, untyped
        compressed, context = hvd.Compression.fp16.compress(source)
        assert np.dtype(compressed.dtype) == travels and (compressed is source) == (dtype == travels)
        restored = hvd.Compression.fp16.decompress(compressed, context)
        assert np.dtype(restored.dtype) == dtype and restored.asnumpy().tolist() == [1, 2]
        assert hvd.Compression.none.compress(source)[0] is source
        assert hvd.Compression.none.decompress(source, None) is source
