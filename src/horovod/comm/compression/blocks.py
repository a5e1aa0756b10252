"""Floating-point numbers as small integers with a scale for each block: what a compressed reduction sends. Pure.

A block of consecutive elements becomes one float32, the scale, and one signed integer per element, the code: element i is
``code[i] * scale``. The scale is the largest magnitude of the block divided by the largest code, so the error of an element is
at most half a scale: 1/254 of the largest magnitude for int8 and 1/14 for int4. Codes are rounded to nearest-even.

A block with an infinite element or a NaN has the scale NaN, so all of its elements become NaN. A block whose largest magnitude
is below :data:`LEAST` becomes zeros.

Sources: Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", 2017 (arXiv:1610.02132),
for codes with a scale per bucket; Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
2019 (arXiv:1901.09847), for adding the error to the next step's gradient instead of rounding at random; Wang et al., "ZeRO++:
Extremely Efficient Collective Communication for Giant Model Training", 2023 (arXiv:2306.10209), for blocks in a reduction
that sends codes and adds in full precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from horovod.comm.datatypes import FLOATING, Array, DataType
from horovod.comm.reduction import Workspace

LEAST = 1e-36
"""Blocks of smaller magnitudes become zeros: 127 divided by such a number is no float32."""
MOST = 3e38
"""Blocks with larger magnitudes become NaN, like infinite ones: the product of code and scale may be no float32."""

_FLOAT32 = np.dtype(np.float32)
_SCALE_BYTES = 4
_MAGNITUDE = np.int32(0x7FFFFFFF)  # all bits of a float32 but the sign
_NO_FRACTION = np.float32(1.5 * 2**23)
_ROUNDED, _INVERSES = -2, -1  # scratch vectors


class BlockFormat(NamedTuple):
    """One way to write floating-point numbers as small integers.

    Attributes:
        name: as users write it.
        bits: of a code: 8 or 4.
        block: elements that share a scale; an even number.
    """

    name: str
    bits: int
    block: int

    @property
    def largest(self) -> int:
        """The largest code; the smallest one is its negative."""
        return (1 << (self.bits - 1)) - 1

    def blocks(self, elements: int) -> int:
        """The number of blocks of so many consecutive elements; the last one may be filled up with zeros."""
        return -(-elements // self.block)

    def nbytes(self, blocks: int) -> int:
        """The bytes of so many blocks: their scales, then their codes."""
        return blocks * (_SCALE_BYTES + self.block * self.bits // 8)


FORMATS: Mapping[str, BlockFormat] = {
    each.name: each for each in (BlockFormat("int8", 8, 256), BlockFormat("int4", 4, 64))
}
"""The formats that users can choose."""

LEAST_ELEMENTS = 4096
"""Tensors of fewer elements are sent as they are: they take a latency in any format, and are often biases and norms, which need
their precision."""


def can_compress(data_type: DataType, elements: int) -> bool:
    """Whether a tensor is sent compressed where compression is asked for. It depends on nothing else, so never on a batch."""
    return elements >= LEAST_ELEMENTS and data_type in FLOATING


class BlockCoder:
    """Writes blocks as codes and reads them back, with scratch memory that it keeps. Not for several threads at a time.

    Blocks are arrays of float32 of shape [blocks, form.block]; packed blocks are vectors of ``form.nbytes(blocks)`` bytes.

    Attributes:
        workspace: the scratch memory. Vectors that are not numbered below zero are for the caller.
    """

    def __init__(self, form: BlockFormat) -> None:
        self.form = form
        self.workspace = Workspace()

    def pack(self, values: Array, packed: Array, read: bool = True) -> tuple[Array, bool]:
        """Write ``values`` to ``packed``.

        Args:
            read: whether the result is used.

        Returns:
            What :meth:`unpack` will read from it, in scratch memory that the next call overwrites (anything unless ``read``),
            and whether all of it is finite.
        """
        form, count = self.form, len(values)
        scales, codes = self._parts(packed, count)
        rounded = self.workspace.array(_ROUNDED, _FLOAT32, values.size).reshape(values.shape)
        # Positive floats are ordered as their bits are, with NaN above infinity, and integers are compared twice as fast.
        magnitudes = np.bitwise_and(values.view(np.int32), _MAGNITUDE, out=rounded.view(np.int32))
        largest = magnitudes.max(axis=1).view(np.float32)
        inverses = self.workspace.array(_INVERSES, _FLOAT32, count)
        np.divide(np.float32(form.largest), largest, out=inverses)
        np.multiply(largest, np.float32(1 / form.largest), out=scales)
        usual = (largest >= LEAST) & (largest <= MOST)
        all_usual = finite = bool(usual.all())
        if not all_usual:
            inverses[~usual] = 0.0
            scales[~usual] = np.where(largest[~usual] < LEAST, np.float32(0), np.float32(np.nan))
            finite = bool((largest <= MOST).all())
        np.multiply(values, inverses[:, None], out=rounded)
        # Rounds to nearest-even, because a sum of this size has no room for a fraction. Leaves no -0.0, which has no code.
        np.add(rounded, _NO_FRACTION, out=rounded)
        np.subtract(rounded, _NO_FRACTION, out=rounded)
        if not all_usual:
            rounded[~usual] = 0.0  # an infinite element times 0 is NaN, which has no code
        if form.bits == 8:
            np.copyto(codes, rounded, casting="unsafe")
        else:
            half = form.block // 2
            pairs = rounded[:, half:] * np.float32(16)
            pairs += rounded[:, :half]
            pairs += np.float32(8 + 16 * 8)
            np.copyto(codes.view(np.uint8), pairs, casting="unsafe")
        if read:
            np.multiply(rounded, scales[:, None], out=rounded)
        return rounded, finite

    def unpack(self, packed: Array, values: Array) -> None:
        """Read ``values`` from ``packed``."""
        scales, codes = self._parts(packed, len(values))
        if self.form.bits == 8:
            np.copyto(values, codes)
        else:
            half = self.form.block // 2
            pairs = codes.view(np.uint8)
            np.copyto(values[:, :half], (pairs & 15).view(np.int8) - np.int8(8))
            np.copyto(values[:, half:], (pairs >> 4).view(np.int8) - np.int8(8))
        np.multiply(values, scales[:, None], out=values)

    def _parts(self, packed: Array, count: int) -> tuple[Array, Array]:
        """The scales and, by block, the codes of ``count`` packed blocks."""
        split = count * _SCALE_BYTES
        return packed[:split].view(np.float32), packed[split:].view(np.int8).reshape(count, -1)


class BlockCoders:
    """The coders of one communicator, by format."""

    def __init__(self) -> None:
        self._known: dict[BlockFormat, BlockCoder] = {}

    def of(self, form: BlockFormat) -> BlockCoder:
        """The coder of a format."""
        found = self._known.get(form)
        if found is None:
            found = self._known[form] = BlockCoder(form)
        return found
