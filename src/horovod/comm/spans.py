"""Several vectors treated as one, given by their addresses or as arrays.

Making a NumPy array takes as long as copying some kilobytes. So a binding with many tensors passes their addresses: the kernel
copies small ones in one call, and arrays are made only where code needs them. An engine reads and writes the elements of all
vectors by one index, so it needs no buffer of the size of a batch.
"""

from __future__ import annotations

import ctypes
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np

from horovod.comm.datatypes import Array
from horovod.comm.reduction import ReduceOp, Workspace, reduce_into

VECTORS = max(16, os.sysconf("SC_IOV_MAX"))
"""The most memory ranges that one system call takes."""

IOVEC_BYTES = 16
"""The size of one memory range as system calls take it: an address and a number of bytes (``struct iovec``)."""

_WRITABLE = 0x200  # PyBUF_WRITE
_memory_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_memory_at.restype = ctypes.py_object


def address_of(array: Array) -> int:
    """The address of an array's elements."""
    return int(array.__array_interface__["data"][0])


def bytes_at(address: int, length: int) -> Array:
    """An array of bytes over ``length`` bytes of host memory at ``address``. It does not keep the memory alive."""
    return np.frombuffer(_memory_at(address, length, _WRITABLE), np.uint8) if length else np.empty(0, np.uint8)


HOST = "cpu"
"""The kind of device for host memory, which the processor reads and writes."""


class Layout(msgspec.Struct, eq=False, gc=False):
    """The part of spans that does not depend on addresses, and stays the same from training step to training step.

    Attributes:
        dtype: of all elements.
        sizes: the vectors' sizes in elements; ``ends`` are their running sums.
        lengths: the vectors' sizes in bytes.
        nbytes: the bytes of all vectors.
        device: the device of the memory: :data:`HOST`, or a device's name, for example ``cuda:1``.
    """

    dtype: np.dtype[Any]
    sizes: list[int]
    ends: list[int]
    lengths: Array
    nbytes: int
    device: str = HOST

    @classmethod
    def of(cls, dtype: np.dtype[Any], sizes: Sequence[int], device: str = HOST) -> Layout:
        sizes = list(sizes)
        lengths = np.array(sizes, np.uintp) * np.uintp(dtype.itemsize)
        return cls(dtype, sizes, list(accumulate(sizes)), lengths, sum(sizes) * dtype.itemsize, device)


class Spans(msgspec.Struct, gc=False):
    """Vectors of one dtype, whose concatenation is indexed by element. Copies nothing.

    The code that passes addresses keeps their memory alive as long as they are used. :func:`spans_of` makes spans of arrays.

    Attributes:
        layout: the dtype and sizes of the vectors.
        addresses: the address of each vector; arbitrary for an empty vector. Empty if the vectors are given as arrays.
    """

    layout: Layout
    addresses: Sequence[int]
    _arrays: Sequence[Array] | None = None
    _table: Array | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the elements."""
        return self.layout.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of all vectors."""
        return self.layout.nbytes

    @property
    def length(self) -> int:
        """Elements in total."""
        ends = self.layout.ends
        return ends[-1] if ends else 0

    def __len__(self) -> int:
        return len(self.layout.sizes)

    def __iter__(self) -> Iterator[Array]:
        return iter(self.arrays())

    def __getitem__(self, index: int) -> Array:
        return self.arrays()[index]

    def arrays(self) -> Sequence[Array]:
        """The vectors as one-dimensional arrays. Arrays that are made from addresses do not keep the memory alive.

        Raises:
            ValueError: the vectors are in the memory of a device.
        """
        if self._arrays is None:
            if self.layout.device != HOST:
                raise ValueError(
                    f"vectors in the memory of {self.layout.device} were handed to an engine for host memory"
                )
            dtype = self.layout.dtype
            self._arrays = [
                np.frombuffer(_memory_at(address, size * dtype.itemsize, _WRITABLE), dtype)
                if size
                else np.empty(0, dtype)
                for address, size in zip(self.addresses, self.layout.sizes, strict=True)
            ]
        return self._arrays

    def table(self) -> Array:
        """The address of each vector, as 64-bit integers."""
        if self._table is None:
            known = self.addresses or [address_of(array) for array in self.arrays()]
            self._table = np.array(known, np.uintp)
        return self._table

    def part(self, vector: int, begin: int, end: int) -> Array:
        """Elements ``[begin, end)``, at least one, of one vector."""
        if self._arrays is not None:
            return self._arrays[vector][begin:end]
        itemsize = self.layout.dtype.itemsize
        memory = _memory_at(self.addresses[vector] + begin * itemsize, (end - begin) * itemsize, _WRITABLE)
        return np.frombuffer(memory, self.layout.dtype)

    def iovecs(self, start: int, stop: int) -> Array:
        """The memory of elements ``[start, stop)``, as an array of shape [ranges, 2]: each row is an address and a number of
        bytes (``iovec``)."""
        layout = self.layout
        if start >= stop:
            return np.empty((0, 2), np.uintp)
        first, last = bisect_right(layout.ends, start), bisect_left(layout.ends, stop)
        found = np.empty((last + 1 - first, 2), np.uintp)
        found[:, 0] = self.table()[first : last + 1]
        found[:, 1] = layout.lengths[first : last + 1]
        before = (start - layout.ends[first] + layout.sizes[first]) * layout.dtype.itemsize
        if before:
            found[0, 0] += np.uintp(before)
            found[0, 1] -= np.uintp(before)
        found[-1, 1] -= np.uintp((layout.ends[last] - stop) * layout.dtype.itemsize)
        return found

    def runs(self, start: int, stop: int) -> list[Array]:
        """The contiguous views that make up elements ``[start, stop)``, in order. Empty vectors do not appear."""
        if start >= stop:
            return []
        arrays, ends = self.arrays(), self.layout.ends
        if len(ends) == 1:
            return [arrays[0][start:stop]]
        index = bisect_right(ends, start)
        begin = start - (ends[index] - arrays[index].size)
        if stop <= ends[index]:
            return [arrays[index][begin : begin + stop - start]]
        found = [arrays[index][begin:]]
        index += 1
        while ends[index] < stop:
            if arrays[index].size:
                found.append(arrays[index])
            index += 1
        found.append(arrays[index][: stop - (ends[index] - arrays[index].size)])
        return found

    def read(self, start: int, stop: int, target: Array) -> None:
        """Copy elements ``[start, stop)`` into ``target``, which has ``stop - start`` elements ("pack")."""
        runs = self.runs(start, stop)
        if len(runs) == 1:
            np.copyto(target, runs[0])
        elif runs:
            np.concatenate(runs, out=target)

    def write(self, start: int, stop: int, source: Array, factor: float = 1.0) -> None:
        """Copy ``source`` over elements ``[start, stop)`` ("unpack"), multiplied by ``factor``, which only floating types
        support."""
        position = 0
        scalar = source.dtype.type(factor)
        for run in self.runs(start, stop):
            part = source[position : position + run.size]
            if factor == 1.0:
                run[:] = part
            else:
                np.multiply(part, scalar, out=run)
            position += run.size

    def whole(self, start: int, stop: int) -> Array | None:
        """Elements ``[start, stop)`` as one view if they are all in one vector, else None."""
        runs = self.runs(start, stop)
        return runs[0] if len(runs) == 1 else None

    def reduce(
        self,
        start: int,
        stop: int,
        contributions: Sequence[Array],
        op: ReduceOp,
        prescale: float,
        postscale: float,
        workspace: Workspace,
    ) -> None:
        """Write the reduction of ``contributions``, vectors of ``stop - start`` elements, over elements ``[start, stop)``.

        The other arguments are those of :func:`~horovod.comm.reduction.reduce_into`."""
        whole = self.whole(start, stop)
        if whole is not None:
            reduce_into(whole, contributions, op, prescale, postscale, workspace)
        elif start < stop:
            result = workspace.array(2, contributions[0].dtype, stop - start)
            reduce_into(result, contributions, op, prescale, postscale, workspace)
            self.write(start, stop, result)


Vectors = Sequence[Array] | Spans
"""One-dimensional arrays of one dtype, or spans. Vectors of several dtypes are a list of arrays. In the memory of a device they
are a list of spans of one vector each, which :func:`joined` makes and :func:`vector_of` takes."""


def host_vector(dtype: np.dtype[Any], length: int, value: Any = None) -> Vectors:
    """A new vector in host memory, filled with ``value``; uninitialized for None."""
    return [np.empty(length, dtype) if value is None else np.full(length, value, dtype)]


def vector_of(vectors: Vectors, index: int) -> Vectors:
    """The vector of this index, as vectors that hold only it."""
    if isinstance(vectors, Spans):
        layout = vectors.layout
        return Spans(layout_of(layout.dtype, (layout.sizes[index],), layout.device), [vectors.addresses[index]])
    found: Any = vectors[index]
    return found if isinstance(found, Spans) else [found]


def dtype_of(vectors: Vectors) -> np.dtype[Any]:
    """The dtype of the first vector; there must be at least one."""
    return vectors.layout.dtype if isinstance(vectors, Spans) else vectors[0].dtype


def arrays_of(vectors: Vectors) -> Sequence[Array]:
    """The vectors as arrays, for engines of host memory."""
    return vectors.arrays() if isinstance(vectors, Spans) else vectors


def sizes_of(vectors: Vectors) -> Sequence[int]:
    """The number of elements of each vector."""
    return vectors.layout.sizes if isinstance(vectors, Spans) else [vector.size for vector in vectors]


def size_in_bytes(vectors: Vectors) -> int:
    """The bytes of all vectors, which may have several dtypes."""
    if isinstance(vectors, Spans):
        return vectors.layout.nbytes
    return sum([vector.nbytes for vector in vectors])


@lru_cache(maxsize=1024)
def layout_of(dtype: np.dtype[Any], sizes: tuple[int, ...], device: str = HOST) -> Layout:
    """The layout of vectors of these sizes (in elements). The same arguments get the same object."""
    return Layout.of(dtype, sizes, device)


def spans_of(vectors: Vectors) -> Spans:
    """Vectors of one dtype in host memory as spans."""
    if isinstance(vectors, Spans):
        return vectors
    if not vectors:
        return Spans(layout_of(np.dtype(np.uint8), ()), ())
    return Spans(layout_of(vectors[0].dtype, tuple([array.size for array in vectors])), (), vectors)


def source_and_target(inputs: Vectors, outputs: Vectors) -> tuple[Spans, Spans]:
    """The spans of both sides of a reduction; the same object twice if the reduction is in place."""
    source = spans_of(inputs)
    return source, source if outputs is inputs else spans_of(outputs)


@lru_cache(maxsize=64)
def _joined_layout(layouts: tuple[Layout, ...]) -> Layout | None:
    """The layout of all vectors together; None if they are not of one dtype and device. Cached, because every training step has
    the same batches."""
    dtype, device = layouts[0].dtype, layouts[0].device
    if any(layout.dtype is not dtype or layout.device != device for layout in layouts):
        return None
    return Layout.of(dtype, [size for layout in layouts for size in layout.sizes], device)


def joined_spans(parts: Sequence[Vectors]) -> Spans | None:
    """The vectors of all parts together, if all parts are spans of one dtype and device; else None."""
    spans = [part for part in parts if isinstance(part, Spans)]
    layout = _joined_layout(tuple([part.layout for part in spans])) if len(spans) == len(parts) else None
    return None if layout is None else Spans(layout, [address for part in spans for address in part.addresses])


def joined(parts: Sequence[Vectors]) -> Vectors:
    """The vectors of all parts together: as spans if all parts are spans of one dtype and device, else as a list."""
    if len(parts) == 1:
        return parts[0]
    together = joined_spans(parts)
    return [vector for part in parts for vector in _each(part)] if together is None else together


def _each(vectors: Vectors) -> Sequence[Any]:
    """The vectors one by one: as arrays, or as spans of one vector each if they are in the memory of a device."""
    if isinstance(vectors, Spans) and vectors.layout.device != HOST:
        return [vector_of(vectors, index) for index in range(len(vectors))]
    return arrays_of(vectors)
