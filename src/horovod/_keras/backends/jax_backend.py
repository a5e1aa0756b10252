"""Keras on JAX: a callback in the jitted train step reduces the gradients.

On a CPU the callback gets the memory of the gradients and reduces them in place. For 64 MB this is six times as fast as
``jax.experimental.io_callback``, and it cannot block as a callback that makes JAX arrays can. On other devices JAX copies the
gradients to host memory and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.experimental import io_callback

from horovod._keras.distribution import Reducer, variable_name
from horovod._keras.exchange import Exchange
from horovod._keras.settings import Settings
from horovod.comm.datatypes import Array
from horovod.comm.reduction import ReduceOp
from horovod.common.compression import CastCompressor, NoneCompressor

buffer_callback: Callable[..., Any] | None
try:
    from jax.experimental import buffer_callback as _module

    buffer_callback = _module.buffer_callback
except ImportError:  # JAX before 0.6
    buffer_callback = None


class _Cast(CastCompressor):
    @staticmethod
    def can_cast(tensor: Any) -> bool:
        return bool(jnp.issubdtype(tensor.dtype, jnp.floating))

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return tensor.astype(dtype)

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        return super().compress(jnp.asarray(tensor))


class FP16Compressor(_Cast):
    """float16: three more bits of precision than bfloat16, but gradients above 65504 overflow."""

    narrow = jnp.float16


class BF16Compressor(_Cast):
    """bfloat16: the range of float32 with 8 bits of precision."""

    narrow = jnp.bfloat16


class Compression:
    """The choices for ``compression=``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


class JaxReducer(Reducer):
    """Reduces one optimizer's gradients in the computation that is being traced."""

    def __init__(self, settings: Settings) -> None:
        self._compression = settings.compression
        self._exchange = Exchange(settings)

    def __call__(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        cut: Sequence[Sequence[int]] | None,
        op: ReduceOp,
        factor: float,
    ) -> list[Any]:
        compressed, contexts = zip(*[self._compression.compress(jnp.asarray(each)) for each in gradients], strict=True)
        names = [f"gradient of {variable_name(variable)}" for variable in variables]

        def reduce(arrays: Sequence[Array]) -> None:
            self._exchange.reduce(arrays, names, cut, op, factor)

        reduced = _in_host_memory(reduce, compressed)
        return [self._compression.decompress(each, context) for each, context in zip(reduced, contexts, strict=True)]


def _in_host_memory(change: Callable[[Sequence[Array]], None], arrays: Sequence[Any]) -> list[Any]:
    """Apply ``change`` to the arrays in host memory, in the computation if one is being traced. Returns the results."""
    shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arrays]  # type: ignore[no-untyped-call]  # as JAX has it
    if buffer_callback is not None and jax.default_backend() == "cpu":

        def in_place(_: Any, outputs: Sequence[Any], *inputs: Any) -> None:
            change([np.asarray(output) for output in outputs])

        aliases = {number: number for number in range(len(arrays))}
        through = buffer_callback(in_place, shapes, has_side_effect=True, input_output_aliases=aliases)
        return list(through(*arrays))

    def copied(*inputs: Any) -> list[Array]:
        copies = [np.array(each) for each in inputs]
        change(copies)
        return copies

    return list(io_callback(copied, shapes, *arrays))
