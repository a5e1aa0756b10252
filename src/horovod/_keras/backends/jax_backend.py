"""Keras on JAX: a callback in the jitted train step reduces the gradients.

The callback gets the memory of the gradients and reduces them in place. This is host memory, or the memory of a GPU if an
engine moves it, with the stream that XLA computes on. For 64 MB of host memory this is six times as fast as
``jax.experimental.io_callback``, and it cannot block, unlike a callback that makes JAX arrays. Elsewhere JAX copies the
gradients to host memory and back.
"""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.experimental import io_callback
from jax.extend.core import get_opaque_trace_state
from keras.src.backend.common.stateless_scope import get_stateless_scope

from horovod._base.config import GPU_OPERATIONS
from horovod._bindings.compression import CastCompressor, Int4Compressor, Int8Compressor, NoneCompressor
from horovod._bindings.device_tensors import CudaDevices, OnDevice
from horovod._bindings.dlpack import address_in
from horovod._bindings.reductions import ReductionArguments
from horovod._keras.distribution import Reducer, variable_name
from horovod._keras.guarding import OptimizerGuard
from horovod._keras.in_place_exchange import InPlaceExchange
from horovod._keras.settings import KerasSettings
from horovod._models.arrival import Arrival
from horovod.comm.datatypes import Array, data_type_of
from horovod.comm.reduction import ReduceOp
from horovod.comparison import missing_gradients
from horovod.comparison.guard import ELEMENTS, compared_parameters
from horovod.comparison.missing_gradients import GradientKind
from horovod.core.errors import HorovodInternalError
from horovod.core.lifecycle.context import running
from horovod.core.requests import devices
from horovod.core.requests.tensor import Tensor

_DLPACK_CPU = 1  # kDLCPU

buffer_callback: Callable[..., Any] | None
try:
    from jax.experimental import buffer_callback as _module

    buffer_callback = _module.buffer_callback
except ImportError:  # JAX before 0.6
    buffer_callback = None


class _JaxCast(CastCompressor):
    @staticmethod
    def can_cast(tensor: Any) -> bool:
        return bool(jnp.issubdtype(tensor.dtype, jnp.floating))

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return tensor.astype(dtype)

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        return super().compress(jnp.asarray(tensor))


class FP16Compressor(_JaxCast):
    """float16: three more bits of precision than bfloat16, but gradients above 65504 overflow."""

    narrow = jnp.float16


class BF16Compressor(_JaxCast):
    """bfloat16: the range of float32 with 8 bits of precision."""

    narrow = jnp.bfloat16


class Compression:
    """The choices for ``compression=``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8Compressor
    int4 = Int4Compressor


class JaxReducer(Reducer):
    """Reduces one optimizer's gradients in the computation that is being traced."""

    def __init__(self, settings: KerasSettings) -> None:
        self._settings = settings
        self._compression = settings.compression
        self._exchange = InPlaceExchange(settings)
        self._uncompared = False  # the variables had no values when their gradients were reduced last
        self._seen: tuple[int, Callable[[], None]] | None = None  # compares the step before, with its generation
        self._handed_out: Any = None  # the trace in which the script got reduced gradients, until it applies them

    def arrivals(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Arrival]:
        here, self._handed_out = self._handed_out, None
        if here is None:
            return [_arrival(gradient) for gradient in gradients]
        if here == _trace():
            return [Arrival.REDUCED] * len(gradients)
        if self._settings.op == ReduceOp.SUM:
            raise ValueError(
                "hvd.reduce_gradients has reduced gradients in a different function from the one that applies them; "
                "DistributedOptimizer(op=hvd.Sum) would sum them over the ranks again. Reduce and apply in one function"
            )
        return [Arrival.UNKNOWN] * len(gradients)

    def hand_out(self, given: Sequence[Any], reduced: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        self._handed_out = _trace()
        return list(reduced)

    def __call__(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        cut: Sequence[Sequence[int]] | None,
        op: ReduceOp,
        factor: float,
    ) -> list[Any]:
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        pairs = [self._compression.compress(jnp.asarray(gradients[index])) for index in present]
        names = [f"gradient of {variable_name(variables[index])}" for index in present]
        shapes = tuple((str(each.dtype), tuple(each.shape)) for each in variables)
        alike = missing_gradients.describe(
            [GradientKind.ABSENT if each is None else GradientKind.DENSE for each in gradients]
        )
        positions = {index: position for position, index in enumerate(present)}
        own_cut = None if cut is None else [[positions[index] for index in each if index in positions] for each in cut]

        guard = None if op == ReduceOp.MAX else self.guard
        held = _held(guard, variables)
        if guard is not None:
            self._uncompared = not held
        if held and guard is not None:
            guard.choose_name(variables)
        debugged = bool(held) and guard is not None and guard.see is not None
        whole = [each.value for each in variables] if debugged else []

        def reduce(tensors: Sequence[Tensor]) -> None:
            if guard is not None:
                self._compare_seen()
            if held and guard is not None and tensors[-1].ready is None:
                others = [each.array for each in tensors[len(present) :]]
                _compare(guard, variables, others[-1], others[:-1])
                if (see := guard.see) is not None and debugged:
                    for index, tensor in zip(present, tensors, strict=False):
                        see(variable_name(variables[index]), tensor.array)
            self._exchange.reduce(tensors[: len(present)], names, own_cut, op, factor, shapes, alike)

        reduced = _changed(
            reduce, [*(tensor for tensor, _ in pairs), *whole, *held], self._exchange.reduction(op, factor)
        )
        results: list[Any] = [None] * len(gradients)
        for index, each, (_, context) in zip(present, reduced[: len(present)], pairs, strict=True):
            results[index] = self._compression.decompress(each, context)
        return results

    def _compare_seen(self) -> None:
        """Compare what the step before has seen when it applied gradients.

        Not in that step itself: after its reduction, a rank may have left that has made its last one.
        """
        seen, self._seen = self._seen, None
        if seen is not None and seen[0] == running().generation:
            seen[1]()

    def applied(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        guard, uncompared, self._uncompared = self.guard, self._uncompared, False
        held = _held(guard, variables) if uncompared else []
        if guard is None or (uncompared and not held):
            return list(gradients)
        guard.choose_name(variables)
        chosen = [gradients[position] for position in compared_parameters(range(len(variables)))]
        present = [each for each in chosen if each is not None]
        if not present:
            return list(gradients)

        def look(tensors: Sequence[Tensor]) -> None:
            if tensors[0].ready is not None:
                return
            values = iter(np.split(tensors[0].array.copy(), _ends(present)))
            own = [None if each is None else next(values) for each in chosen]
            if not held:
                guard.applied_first(own, variables)
                return
            before = tensors[1].array.copy()

            def compare() -> None:
                _compare(guard, variables, before, ())
                guard.applied_first(own, variables)

            self._seen = running().generation, compare

        looked = _changed(look, [_joined(present), *held], self._exchange.reduction(ReduceOp.AVERAGE, 1.0))
        # The step uses nothing before the look at it.
        tied: list[Any]
        tied, _ = jax.lax.optimization_barrier((list(gradients), looked))  # type: ignore[no-untyped-call]  # as JAX has it
        return tied


def _joined(arrays: Sequence[Any]) -> Any:
    """The first elements of each array."""
    parts = [jnp.reshape(each, (-1,))[:ELEMENTS] for each in arrays]
    return jnp.concatenate([each.astype(jnp.result_type(float)) for each in parts])


def _ends(arrays: Sequence[Any]) -> list[int]:
    """Where the elements of each array but the last end in :func:`_joined`."""
    ends = accumulate(min(int(np.prod(each.shape)), ELEMENTS) for each in arrays)
    return [*ends][:-1]


def _held(guard: OptimizerGuard | None, variables: Sequence[Any]) -> list[Any]:
    """The learning rate, if there is one, and the first elements of some variables: one array of the computation.

    An empty list if the variables have no values here: in the script's own stateless training step, the values are elsewhere.
    """
    rate = None if guard is None else guard.rate()
    every = [*([] if rate is None else [rate]), *compared_parameters(variables)]
    if guard is None or not all(_has_value(each) for each in every):
        return []
    return [_joined([each.value for each in every])]


def _has_value(variable: Any) -> bool:
    scope = get_stateless_scope()
    in_scope = scope is not None and scope.get_current_value(variable) is not None
    return in_scope or getattr(variable, "_value", None) is not None


def _compare(guard: OptimizerGuard, variables: Sequence[Any], held: Any, whole: Sequence[Any]) -> None:
    """Compare the values of :func:`_held` between the ranks, and those of all variables if ``whole`` has them."""
    values = np.asarray(held)
    own = values if guard.rate() is None else values[1:]
    samples = np.split(own, _ends(compared_parameters(variables)))
    rate = None if guard.rate() is None else lambda: values[0]
    guard.compare(variables, rate, lambda: samples, lambda: whole)


def _trace() -> object:
    """An object that identifies the computation that is being traced, if any."""
    return get_opaque_trace_state()  # type: ignore[no-untyped-call]  # as JAX has it


def _arrival(gradient: Any) -> Arrival:
    """The state of a gradient in a trace, by the operation that made it. UNKNOWN outside of a trace, and with a version of JAX
    whose tracers do not record that operation.
    """
    operation = getattr(gradient, "parent", None)
    names = getattr(getattr(operation, "source_info", None), "name_stack", None)
    if names is None:
        return Arrival.UNKNOWN
    return Arrival.LOCAL if "transpose(" in str(names) else Arrival.CHANGED


def _changed(
    change: Callable[[Sequence[Tensor]], None], arrays: Sequence[Any], reduction: ReductionArguments
) -> list[Any]:
    """Apply ``change`` to the arrays, in the computation if one is being traced. Returns the results.

    Args:
        change: changes tensors of the core in place.
        arrays: the arrays, all in host memory or all on one device.
        reduction: the reduction that ``change`` makes.
    """
    shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arrays]  # type: ignore[no-untyped-call]  # as JAX has it
    data_types = [data_type_of(np.empty(0, each.dtype)) for each in shapes]

    def in_place(context: Any, outputs: Sequence[Any], *inputs: Any) -> None:
        if _in_host_memory(outputs):
            change([_host_tensor(np.asarray(output)) for output in outputs])
            return
        engine = jax_devices.engine(data_types, reduction)
        if not engine:
            raise HorovodInternalError(
                "this training step was compiled for an engine that moves the memory of GPUs, and the job no longer has one: "
                f"call model.compile() again, or set {GPU_OPERATIONS}=HOST on all ranks"
            )
        addresses = [address_in(output.__dlpack__()) for output in outputs]
        address = max(addresses)
        if not address:
            change([_host_tensor(np.empty(each.shape, each.dtype)) for each in shapes])
            return
        runtime = jax_devices.use(address)
        with runtime.on(context.stream):
            submission = OnDevice(runtime, engine)
            change(
                [
                    submission.tensor(address, data_type, each.shape)
                    for address, data_type, each in zip(addresses, data_types, shapes, strict=True)
                ]
            )

    def copied(*inputs: Any) -> list[Array]:
        copies = [np.array(each) for each in inputs]
        change([_host_tensor(copy) for copy in copies])
        return copies

    if buffer_callback is not None and (_computes_on_host() or jax_devices.engine(data_types, reduction)):
        aliases = {number: number for number in range(len(arrays))}
        through = buffer_callback(in_place, shapes, has_side_effect=True, input_output_aliases=aliases)
        return list(through(*arrays))
    return list(io_callback(copied, shapes, *arrays))


def _host_tensor(array: Array) -> Tensor:
    return Tensor(array.reshape(-1), data_type_of(array), array.shape)


def _computes_on_host() -> bool:
    return bool(jax.default_backend() == "cpu")


def _in_host_memory(buffers: Sequence[Any]) -> bool:
    return not buffers or buffers[0].__dlpack_device__()[0] == _DLPACK_CPU


def _lacking() -> str:
    if buffer_callback is None:
        return "this version of JAX cannot share device memory; install JAX 0.6 or newer"
    plugins = importlib.util.find_spec("jax_plugins")
    folders = plugins.submodule_search_locations if plugins is not None else None
    if any(each.name.startswith("xla_cuda") for each in pkgutil.iter_modules(folders or [])):
        return ""
    return "this JAX has no plugin for CUDA: pip install 'jax[cuda12]' or 'jax[cuda13]'"


def _first() -> tuple[int, object]:
    made = jnp.zeros(1).block_until_ready()
    return address_in(made.__dlpack__()), made


jax_devices = CudaDevices(_lacking, _first)
devices.provide(jax_devices)
