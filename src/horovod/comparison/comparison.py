"""Compares bytes between the ranks of a process set, and gathers them if they differ.

Usually all ranks hold the same bytes, so a :class:`Comparison` is one small allreduce. Only if it finds a difference do the
ranks gather what each holds. Ranks that have joined (``hvd.join()``) are left out.

Every rank adds ``1, a, a^2, b, b^2`` for two digests ``a`` and ``b`` of its bytes. If ``n`` ranks have added, the sums are
``n, na, na^2, nb, nb^2`` for a rank's own digests exactly if all digests are equal: otherwise their variance is not 0.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping

import numpy as np

from horovod.comm.datatypes import Array, DataType
from horovod.comm.reduction import ReduceOp
from horovod.comm.tuned import TunedSettings
from horovod.core.lifecycle.context import running
from horovod.core.requests.handle import Handle
from horovod.core.requests.tensor import Tensor
from horovod.core.submission.collectives import allgather, prepared_allreduce
from horovod.core.submission.prepared import Prepared

_TERMS = 5
_ROW = struct.Struct("<II")


def sum_terms(held: bytes) -> Array:
    """A rank's terms of the sums for the bytes that it holds: five int64. Digests have 24 bits, so 2**15 squares fit."""
    digest = hashlib.blake2b(held, digest_size=6).digest()
    a, b = int.from_bytes(digest[:3], "little"), int.from_bytes(digest[3:], "little")
    return np.array([1, a, a * a, b, b * b], dtype=np.int64)


def all_equal(own: Array, sums: Array) -> bool:
    """Whether all ranks that have added their terms to ``sums`` have added ``own``. The same on all of them."""
    return bool(np.array_equal(own * sums[0], sums))


def pack(rank: int, held: bytes) -> bytes:
    """One rank's row in the gathered data."""
    return _ROW.pack(rank, len(held)) + held


def unpack(rows: bytes) -> dict[int, bytes]:
    """The bytes of each rank, by rank, from the concatenated rows of all."""
    found: dict[int, bytes] = {}
    offset = 0
    while offset < len(rows):
        rank, length = _ROW.unpack_from(rows, offset)
        offset += _ROW.size
        found[rank] = rows[offset : offset + length]
        offset += length
    return found


class Comparison:
    """A running comparison. Every member of the process set that has not joined must make it, in the same order.

    A caller that may wait calls :meth:`wait`. Others call :meth:`differs` in a later step and, if the ranks differ,
    :meth:`gather` in that step and :meth:`held` in one after it: so the requests run beside the gradients of these steps.

    Args:
        name: the name of the comparison in stall reports and errors. Comparisons of one name run one after another.
        held: what this rank holds.
        process_set_id: the ranks that compare.
        line: the line of the script that it belongs to.
        awaited: whether the calling thread waits for it next.
    """

    def __init__(
        self, name: str, held: bytes, process_set_id: int | None, line: str = "", awaited: bool = False
    ) -> None:
        self._name, self._held, self._set = name, held, process_set_id
        self._terms = sum_terms(held)
        self._sums = np.empty_like(self._terms)
        prepared: Prepared = prepared_allreduce(
            name, [(name, DataType.INT64, (_TERMS,))], ReduceOp.SUM, prescale=1.0, postscale=1.0, line=line
        )
        self._handle: Handle = prepared.submit(process_set_id, [self._terms], [self._sums], awaited)
        self._rows: Handle | None = None
        self._gathered: list[Array] = []

    def wait(self) -> Mapping[int, bytes] | None:
        """The bytes of each rank, by global rank; None if all are equal. The same on every rank.

        Raises:
            HorovodInternalError: the job has failed.
        """
        if not self.differs():
            return None
        self.gather(awaited=True)
        return self.held()

    def differs(self) -> bool:
        """Wait until the ranks have compared. Returns whether they hold different bytes; the same answer on all ranks."""
        self._handle.wait()
        return not all_equal(self._terms, self._sums)

    def gather(self, awaited: bool = False) -> None:
        """Begin to gather what all ranks hold, because they differ."""
        row = np.frombuffer(pack(running().identity.rank, self._held), dtype=np.uint8).copy()

        def allocate(index: int, rows: int) -> Array:
            self._gathered.append(np.empty(rows, dtype=np.uint8))
            return self._gathered[-1]

        tensors = [Tensor(row, DataType.UINT8, row.shape)]
        self._rows = allgather("allgather", f"{self._name}.held", tensors, allocate, self._set, awaited=awaited)

    def held(self) -> dict[int, bytes]:
        """The bytes of each rank, by global rank, after :meth:`gather`."""
        assert self._rows is not None
        self._rows.wait()
        return unpack(self._gathered[-1].tobytes())

    @property
    def tuned(self) -> TunedSettings | None:
        """The settings that held when the ranks compared; None where nothing is tuned. Known after :meth:`wait`."""
        return self._handle.tuned

    @property
    def members(self) -> int:
        """The number of ranks that took part, without those that have joined. Known after :meth:`wait`."""
        return int(self._sums[0])
