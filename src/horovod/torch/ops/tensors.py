"""PyTorch tensors as the core sees them: one table of types, one check, and their memory as NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import ml_dtypes
import numpy as np
import torch

from horovod.comm.datatypes import Array, DataType
from horovod.comm.reduction import use_halves
from horovod.comm.shm import huge_pages
from horovod.comm.spans import Layout
from horovod.core.submission.tensor import Tensor

DATA_TYPES: dict[torch.dtype, DataType] = {
    torch.uint8: DataType.UINT8,
    torch.int8: DataType.INT8,
    torch.int16: DataType.INT16,
    torch.int32: DataType.INT32,
    torch.int64: DataType.INT64,
    torch.float16: DataType.FLOAT16,
    torch.bfloat16: DataType.BFLOAT16,
    torch.float32: DataType.FLOAT32,
    torch.float64: DataType.FLOAT64,
    torch.bool: DataType.BOOL,
    torch.complex64: DataType.COMPLEX64,
    torch.complex128: DataType.COMPLEX128,
}
for _name in ("uint16", "uint32", "uint64"):  # PyTorch 2.3 and newer
    if hasattr(torch, _name):
        DATA_TYPES[getattr(torch, _name)] = DataType[_name.upper()]

REACHABLE = {"cuda"}
"""Kinds of devices whose tensors can travel, beside the CPU. ROCm's devices are called ``cuda`` too."""

_STRIDED = torch.strided
_NEGATIVE = "Tensor is a view with its sign still to be changed. Call .resolve_neg() on it first."
_CONJUGATE = "Tensor is a view still to be conjugated. Call .resolve_conj() on it first."
_ordinary: set[type] = {torch.Tensor, torch.nn.Parameter}
"""Classes whose tensors have memory of their own."""
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_TORCH_BFLOAT16 = torch.bfloat16


def flat_array(tensor: torch.Tensor) -> Array:
    """The memory of a contiguous CPU tensor as a one-dimensional NumPy array; nothing is copied.

    Raises:
        ValueError: what lies there is not what the tensor stands for.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    try:
        array: Array = tensor.view(torch.int16).numpy() if tensor.dtype is _TORCH_BFLOAT16 else tensor.numpy()
    except RuntimeError:
        check_sign(tensor)
        raise
    if tensor.dtype is _TORCH_BFLOAT16:  # NumPy has no such type of its own
        array = array.view(_BFLOAT16)
    return array if array.ndim == 1 else array.reshape(-1)


def layout_of(tensors: Sequence[torch.Tensor]) -> Layout | None:
    """The layout of what :func:`flat_array` gives for these; None if they are of several types, or complex.

    Others of the same classes, types and shapes may be handed over by ``data_ptr()``, if they are plain (:func:`is_plain`),
    and those of one element pass :func:`check_sign`. Complex ones may be still to be conjugated, of whatever size.
    """
    if any(tensor.dtype.is_complex for tensor in tensors):
        return None
    arrays = [flat_array(tensor) for tensor in tensors]
    dtypes = {array.dtype for array in arrays}
    return Layout.of(arrays[0].dtype, [array.size for array in arrays]) if len(dtypes) == 1 else None


def check_sign(tensor: torch.Tensor) -> None:
    """Raises ValueError for a view whose elements are not what lies in memory: with its sign still to be changed, which is
    contiguous only if it has one element, or still to be conjugated."""
    if tensor.is_neg():
        raise ValueError(_NEGATIVE)
    if tensor.is_conj():
        raise ValueError(_CONJUGATE)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its elements lie one after another, as :func:`check` wants them."""
    return tensor.layout is _STRIDED and tensor.is_contiguous()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same elements as :func:`check` wants it: the tensor itself, or a copy."""
    return tensor.contiguous().resolve_conj().resolve_neg()


def check_apart(tensors: Sequence[torch.Tensor]) -> None:
    """Whether tensors that are all written share no memory. They have passed :func:`check`, so the elements of one lie apart.

    Raises:
        ValueError: two of them do.
    """
    if len(tensors) < 2:
        return
    spans = sorted(
        (tensor.data_ptr(), tensor.nbytes, number) for number, tensor in enumerate(tensors, 1) if tensor.numel()
    )
    for (start, length, one), (following, _, other) in pairwise(spans):
        if start + length > following:
            raise ValueError(
                f"Tensors {min(one, other)} and {max(one, other)} of the group share memory, so an in-place operation would "
                "reduce some elements twice. Pass each tensor once, or copies of them."
            )


def check(tensor: torch.Tensor) -> DataType:
    """The tensor's data type, if it can be communicated as it is.

    Raises:
        ValueError: as :func:`check_kind`; or it is not contiguous, or a view whose elements are still to be computed.
    """
    data_type = check_kind(tensor)
    if not tensor.is_contiguous():
        raise ValueError("Tensor is required to be contiguous. Call .contiguous() on it first.")
    check_sign(tensor)
    return data_type


def check_kind(tensor: torch.Tensor) -> DataType:
    """The tensor's data type, if what :func:`plain` makes of it can be communicated.

    Raises:
        ValueError: no tensor, of an unsupported type, sparse, on a device that cannot be reached, or of a class that has no
            memory of its own, such as a DTensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"expected a torch.Tensor, not {type(tensor).__name__}")
    if tensor.__class__ not in _ordinary:
        _check_class(tensor)
    data_type = DATA_TYPES.get(tensor.dtype)
    if data_type is None or tensor.layout is not torch.strided:
        hint = " Use sparse_allreduce_async or sparse_as_dense=True." if tensor.layout is not torch.strided else ""
        raise ValueError(f"Tensor type {_type_name(tensor)} is not supported.{hint}")
    if not (tensor.is_cpu or tensor.device.type in REACHABLE):
        raise ValueError(
            f"Tensor is on {tensor.device}; this version communicates tensors in host memory and on CUDA or ROCm devices. "
            "Move it with .cpu() first."
        )
    return data_type


def _check_class(tensor: torch.Tensor) -> None:
    """Raise ValueError for a class whose tensors cannot be communicated; remember one whose can.

    A class that says itself what operators do (``__torch_dispatch__``) has its elements wherever it likes. From a device they
    are copied by an operator. Host memory is handed over as it is, so there must be some.
    """
    kind = tensor.__class__
    if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        _ordinary.add(kind)
        return
    if hasattr(kind, "full_tensor") and hasattr(kind, "to_local"):
        raise ValueError(
            f"Tensor is a {kind.__name__}, which is spread over a device mesh, as FSDP2 and tensor parallelism do. "
            "Pass the part of this rank, .to_local(), or the whole, .full_tensor()."
        )
    if tensor.is_cpu:
        raise ValueError(
            f"Tensor is a {kind.__module__}.{kind.__qualname__}, whose elements do not lie in memory of its own. Pass a plain "
            "torch.Tensor of its elements."
        )


def _type_name(tensor: torch.Tensor) -> str:
    """As ``tensor.type()`` has it, which some layouts lack."""
    try:
        return str(tensor.type())
    except RuntimeError:
        return f"{tensor.layout} of {tensor.dtype}"


def view(tensor: torch.Tensor) -> Tensor:
    """A tensor in host memory for the core. Raises as :func:`check`, and for a tensor on a device."""
    data_type = DATA_TYPES.get(tensor.dtype) if isinstance(tensor, torch.Tensor) else None
    # What is left to flat_array() to see, is_neg(), lets another thread run each time it is asked.
    if data_type is None or tensor.__class__ not in _ordinary or not (is_plain(tensor) and tensor.is_cpu):
        data_type = check(tensor)
        if not tensor.is_cpu:
            raise ValueError(f"Tensors in list must be on same device. One is on cpu, another on {tensor.device}.")
    return Tensor(flat_array(tensor), data_type, tuple(tensor.shape))


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A new tensor for a result, contiguous."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    return _prepared(tensor)


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor for a result of the shape and type of ``tensor``, on its device, contiguous."""
    return _prepared(torch.empty_like(tensor, memory_format=torch.contiguous_format))


def _prepared(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.nbytes >= huge_pages.LEAST_BYTES and tensor.is_cpu:
        huge_pages.prefer_huge(tensor.data_ptr(), tensor.nbytes)
    return tensor


def _as_torch(array: Array) -> torch.Tensor:
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _convert(source: Array, target: Array) -> None:
    if not source.flags.writeable:  # PyTorch has no such tensors
        np.copyto(target, source, casting="unsafe")
        return
    _as_torch(target).copy_(_as_torch(source))


def _sum_of_two(first: Array, second: Array, target: Array) -> bool:
    if not (first.flags.writeable and second.flags.writeable):
        return False
    torch.add(_as_torch(first), _as_torch(second), out=_as_torch(target))
    return True


def _mean_of_two(first: Array, second: Array, target: Array) -> bool:
    """``second - (second - first) / 2`` in float32, rounded once.

    That is the mean, but where ``first`` is infinite or the difference overflows; what is not finite is left to others.
    """
    if not (first.flags.writeable and second.flags.writeable):
        return False
    torch.lerp(_as_torch(first), _as_torch(second), 0.5, out=_as_torch(target))
    # The bits of what is not finite are, of either sign, the largest: one look at each sign, without a pass for the sign.
    bits = target.view(np.uint16)
    infinity = _INFINITY[target.dtype]
    return int(bits.view(np.int16).max(initial=0)) < infinity and int(bits.max(initial=0)) < infinity | 0x8000


_INFINITY = {np.dtype(np.float16): 0x7C00, _BFLOAT16: 0x7F80}
"""The bits of infinity, by type."""

# PyTorch's arithmetic of 16-bit floats is vectorised; NumPy's casts take ten times as long.
use_halves(_convert, _sum_of_two, _mean_of_two)
