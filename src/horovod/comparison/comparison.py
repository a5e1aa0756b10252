"""Compares bytes and numbers between the ranks of a process set, and gathers what they hold if they differ.

Usually all ranks hold the same bytes, so a :class:`Comparison` is one small allreduce: for a digest ``d`` of its bytes, every
rank sends ``d`` and ``-d``, and the maxima of both are ``d`` and ``-d`` again exactly if all digests are equal. Only if they
differ do the ranks gather what each holds. Ranks that have joined (``hvd.join()``) are left out.

A second digest may travel along, of bytes that only some ranks have (:mod:`horovod.comparison.samples`).
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
from horovod.core.negotiation.messages import Operation, TensorSpec
from horovod.core.requests.handle import Handle
from horovod.core.requests.tensor import Tensor
from horovod.core.submission.collectives import allgather, prepared_call
from horovod.core.submission.prepared import Prepared

NOTHING = -(1 << 63)
"""In place of a digest: this rank has none. Ranks that have joined send it. No maximum notices it."""
_ROW = struct.Struct("<II")
_TERMS = struct.Struct("=4q")


def digest(content: bytes) -> int:
    """63 bits, the same for the same bytes on all ranks."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1


def terms(held: bytes, beside: int = NOTHING) -> bytes:
    """A rank's terms for the bytes that it holds, and for the digest that travels along: four int64."""
    own = digest(held)
    return _TERMS.pack(own, -own, beside, NOTHING if beside == NOTHING else -beside)


def differences(largest: bytes) -> tuple[bool, bool]:
    """Whether ranks hold different bytes, and whether ranks have different digests beside them. The same on all ranks.

    Args:
        largest: the maximum of each term over the ranks.
    """
    one, other, beside, negated = _TERMS.unpack(largest)
    return one != -other, beside != NOTHING and beside != -negated


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


def request_of(name: str, line: str = "") -> Prepared:
    """The request of all comparisons of one name and line."""
    return prepared_call(
        Operation.ALLREDUCE, "", name, [TensorSpec(name, DataType.INT64, (_TERMS.size // 8,))], ReduceOp.MAX, line=line
    )


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
        beside: the digest that travels along; NOTHING if this rank has none.
        request: what :func:`request_of` returns for this name and line, if it is known.

    Attributes:
        differs_beside: after :meth:`differs` or :meth:`wait`, whether ranks have different digests beside what they hold; the
            same on all ranks.
        tuned: after these, the settings that held when the ranks compared; None where nothing is tuned.
        members: after :meth:`wait`, the number of ranks that took part; None if all have, since none has joined.
    """

    differs_beside = False
    tuned: TunedSettings | None = None
    members: int | None = None

    def __init__(
        self,
        name: str,
        held: bytes,
        process_set_id: int | None,
        line: str = "",
        awaited: bool = False,
        beside: int = NOTHING,
        request: Prepared | None = None,
    ) -> None:
        self._name, self._held, self._set = name, held, process_set_id
        own = np.frombuffer(bytearray(terms(held, beside)), np.int64)
        self._largest = np.empty_like(own)
        request = request or request_of(name, line)
        self._handle: Handle = request.submit(process_set_id, [own], [self._largest], awaited)
        self._rows: Handle | None = None
        self._gathered: list[Array] = []

    def wait(self) -> Mapping[int, bytes] | None:
        """The bytes of each rank, by global rank; None if all are equal. The same on every rank.

        Raises:
            HorovodInternalError: the job has failed.
        """
        if not self.differs() and not self._handle.joined:
            return None
        rows = self.gathered(self._held)
        self.members = len(rows)
        return rows if len({*rows.values()}) > 1 else None

    def differs(self) -> bool:
        """Wait until the ranks have compared. Returns whether they hold different bytes; the same answer on all ranks."""
        self._handle.wait()
        self.tuned = self._handle.tuned
        differs, self.differs_beside = differences(self._largest.tobytes())
        return differs

    def gather(self, held: bytes | None = None, awaited: bool = False) -> None:
        """Begin to gather what all ranks hold, because they differ.

        Args:
            held: what this rank holds, if it is something else than what was compared.
        """
        row = np.frombuffer(pack(running().identity.rank, self._held if held is None else held), dtype=np.uint8).copy()

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

    def gathered(self, held: bytes) -> dict[int, bytes]:
        """What each rank holds, by global rank. Every rank that has made the comparison calls it."""
        self.gather(held, awaited=True)
        return self.held()
