"""Converts PyTorch tensors to what the core takes: the table of types, the checks, and their memory as NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import torch

from horovod.comm.datatypes import Array, DataType
from horovod.comm.reduction import use_halves
from horovod.comm.shm import huge_pages
from horovod.comm.spans import Layout
from horovod.core.requests.tensor import Tensor

DATA_TYPES: dict[torch.dtype, DataType] = {
    getattr(torch, each.label): each
    for each in DataType
    if hasattr(torch, each.label)  # PyTorch 2.3: wide unsigned types
}

REACHABLE = {"cuda"}
"""Kinds of devices, beside the CPU, whose tensors can be communicated. ROCm's devices are called ``cuda`` too."""

_STRIDED = torch.strided
_PLAIN_TYPES = frozenset(each for each in DATA_TYPES if not each.is_complex)
_NEGATIVE = "Tensor is a lazily negated view (is_neg()). Call .resolve_neg() on it first."
_CONJUGATE = "Tensor is a lazily conjugated view (is_conj()). Call .resolve_conj() on it first."
_PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter)
_ordinary: set[type] = {*_PLAIN_CLASSES}
"""Classes of tensors that have memory of their own."""
_dispatch_keys: Any = torch._C._dispatch_keys
_LAZILY_NEGATED: Any = torch._C._dispatch_key_parse("Negative")  # PyTorch 2.1 has no DispatchKey.Negative
_LAZILY_CONJUGATED: Any = torch._C._dispatch_key_parse("Conjugate")
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_TORCH_BFLOAT16 = torch.bfloat16


def flat_array(tensor: torch.Tensor) -> Array:
    """The memory of a contiguous CPU tensor as a one-dimensional NumPy array, without a copy.

    Raises:
        ValueError: as :func:`check_sign`.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    try:
        array: Array = tensor.view(torch.int16).numpy() if tensor.dtype is _TORCH_BFLOAT16 else tensor.numpy()
    except RuntimeError:
        check_sign(tensor)
        raise
    if tensor.dtype is _TORCH_BFLOAT16:  # NumPy itself has no such type
        array = array.view(_BFLOAT16)
    return array if array.ndim == 1 else array.reshape(-1)


def layout_of(tensors: Sequence[torch.Tensor]) -> Layout | None:
    """The layout of the arrays that :func:`flat_array` returns for these tensors; None for several types, or complex ones.

    Other tensors of the same classes, types and shapes may be submitted by their ``data_ptr()`` if :func:`is_plain` is true of
    each, and those of one element pass :func:`check_sign`. Complex tensors of any size may be lazily conjugated.
    """
    if any(tensor.dtype.is_complex for tensor in tensors):
        return None
    arrays = [flat_array(tensor) for tensor in tensors]
    dtypes = {array.dtype for array in arrays}
    return Layout.of(arrays[0].dtype, [array.size for array in arrays]) if len(dtypes) == 1 else None


def check_sign(tensor: torch.Tensor) -> None:
    """Raise ValueError for a view whose elements are not those in memory.

    Such are lazily conjugated views, and lazily negated ones, for example ``x.conj().imag``, which is contiguous only if it
    has one element.
    """
    if tensor.is_neg():
        raise ValueError(_NEGATIVE)
    if tensor.is_conj():
        raise ValueError(_CONJUGATE)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is dense and contiguous."""
    return tensor.layout is _STRIDED and tensor.is_contiguous()


def tracked(*tensors: torch.Tensor) -> bool:
    """Whether autograd records a call with these tensors. Recording takes as long as a small collective."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                return True
    return False


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it, that is contiguous and not lazily negated or conjugated, as :func:`check` demands."""
    return tensor.contiguous().resolve_conj().resolve_neg()


def check_apart(tensors: Sequence[torch.Tensor]) -> None:
    """Check that tensors that are written share no memory. They have passed :func:`check`, so no tensor overlaps itself.

    Raises:
        ValueError: two of them share memory.
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
    """The data type of a tensor that can be communicated as it is.

    Raises:
        ValueError: as :func:`check_kind`; or the tensor is not contiguous, or lazily negated or conjugated.
    """
    data_type = check_kind(tensor)
    if not tensor.is_contiguous():
        raise ValueError("Tensor is required to be contiguous. Call .contiguous() on it first.")
    # is_neg() and is_conj() let go of the interpreter lock, and groups check many tensors.
    keys = _dispatch_keys(tensor)
    if keys.has(_LAZILY_NEGATED) or keys.has(_LAZILY_CONJUGATED):
        check_sign(tensor)
    return data_type


def check_kind(tensor: torch.Tensor) -> DataType:
    """The data type of a tensor that can be communicated after :func:`plain`.

    Raises:
        ValueError: it is not a tensor, of an unsupported type, sparse, on a device that is not supported, or of a class
            without memory of its own, such as a DTensor.
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


def is_dtensor(kind: type) -> bool:
    """Whether a class is :class:`torch.distributed.tensor.DTensor`. Does not import it; its module had other names before."""
    return hasattr(kind, "device_mesh") and hasattr(kind, "to_local")


def _check_class(tensor: torch.Tensor) -> None:
    """Raise ValueError for a class whose tensors cannot be communicated. Other classes are remembered.

    A class that defines what operators do (``__torch_dispatch__``) may keep its elements anywhere. An operator copies elements
    from a device. The core reads host memory itself, so such a tensor must have some.
    """
    kind = tensor.__class__
    if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        _ordinary.add(kind)
        return
    if is_dtensor(kind):
        raise ValueError(
            f"Tensor is a {kind.__name__}, which is distributed over a device mesh, as by FSDP2 and tensor parallelism. "
            "Pass this rank's part, .to_local(), or the whole, .full_tensor()."
        )
    if tensor.is_cpu:
        raise ValueError(
            f"Tensor is a {kind.__module__}.{kind.__qualname__}, which has no memory of its own. Pass a plain torch.Tensor of "
            "its elements."
        )


def _type_name(tensor: torch.Tensor) -> str:
    """The type as ``tensor.type()`` returns it, which raises for some layouts."""
    try:
        return str(tensor.type())
    except RuntimeError:
        return f"{tensor.layout} of {tensor.dtype}"


def view(tensor: torch.Tensor) -> Tensor:
    """A tensor in host memory for the core. Raises as :func:`check`, and for a tensor on a device."""
    data_type = DATA_TYPES.get(tensor.dtype) if isinstance(tensor, torch.Tensor) else None
    # flat_array() finds lazily negated views. is_neg() would release the interpreter lock in every call.
    if data_type is None or tensor.__class__ not in _ordinary or not (is_plain(tensor) and tensor.is_cpu):
        data_type = check(tensor)
        if not tensor.is_cpu:
            raise ValueError(f"Tensors in list must be on same device. One is on cpu, another on {tensor.device}.")
    return Tensor(flat_array(tensor), data_type, tuple(tensor.shape))


def plain_view(tensor: torch.Tensor) -> Tensor | None:
    """:func:`view` of a tensor, flat; None if it is not plain (contiguous, dense, of a type that the core supports, of no other
    subclass of Tensor than Parameter) or not in host memory. Complex tensors may be lazily conjugated, so none is plain."""
    if (
        tensor.__class__ not in _PLAIN_CLASSES
        or not tensor.is_cpu
        or tensor.dtype not in _PLAIN_TYPES
        or tensor.layout is not _STRIDED
        or not tensor.is_contiguous()
    ):
        return None
    try:
        elements = flat_array(tensor)
    except (RuntimeError, ValueError):  # lazily negated: checking beforehand would take longer
        return None
    return Tensor(elements, DATA_TYPES[tensor.dtype], elements.shape)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A new tensor for a result, contiguous."""
    return _with_huge_pages(torch.empty(shape, dtype=dtype, device=device))


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor for a result, of the shape and type of ``tensor``, on its device. Both are contiguous."""
    made = torch.empty_like(tensor)  # it gets the same strides; to name a format takes longer
    return made if made.nbytes < huge_pages.LEAST_BYTES else _with_huge_pages(made)


def _with_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
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
    """``second - (second - first) / 2`` in float32, rounded once. Returns whether that is the mean.

    It is not where ``first`` is infinite or the difference overflows, so False is returned if a result is not finite.
    """
    if not (first.flags.writeable and second.flags.writeable):
        return False
    torch.lerp(_as_torch(first), _as_torch(second), 0.5, out=_as_torch(target))
    # As integers, the bits of infinity and NaN are the largest of their sign: two maxima find them.
    bits = target.view(np.uint16)
    infinity = _INFINITY[target.dtype]
    return int(bits.view(np.int16).max(initial=0)) < infinity and int(bits.max(initial=0)) < infinity | 0x8000


_INFINITY = {np.dtype(np.float16): 0x7C00, _BFLOAT16: 0x7F80}
"""The bits of infinity, by type."""

# PyTorch's arithmetic of 16-bit floats is vectorised; NumPy's casts take ten times as long.
use_halves(_convert, _sum_of_two, _mean_of_two)
