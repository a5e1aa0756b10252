"""Finds out whether compression pays between these hosts, and warns if it does not.

The ranks send a sample of their first large compressed batch as it is and compressed, in turns. All of them do so in the same
batch, which they have in common. On slow links that takes a second or two, once; on fast ones, where it matters, less.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np

from horovod._base.config import COMPRESSION
from horovod.comm.base import Communicator
from horovod.comm.compression.blocks import BlockFormat
from horovod.comm.reduction import ReduceOp
from horovod.comm.spans import Vectors, spans_of

SAMPLE_BYTES = 8 << 20
"""The bytes that are sent for comparison. Smaller batches are not compared."""
ROUNDS = 3
"""How often. The first round is not counted: connections speed up."""

_log = logging.getLogger("horovod.core")


def try_compression(
    communicator: Communicator, source: Vectors, form: BlockFormat, clock: Callable[[], float] = time.perf_counter
) -> None:
    """Compare, if the batch is large enough and these ranks have not compared yet. Every rank calls it with a batch of the same
    size.

    Args:
        source: this rank's vectors, of one type.
        clock: tells the time in seconds.

    Raises:
        PeerFailure, Aborted: as the communicator's collectives.
    """
    spans = spans_of(source)
    if communicator.compared or spans.nbytes < SAMPLE_BYTES:
        return
    communicator.compared = True
    sample = np.empty(SAMPLE_BYTES // spans.dtype.itemsize, spans.dtype)
    spans.read(0, sample.size, sample)
    result = np.empty_like(sample)
    as_it_is, compressed = [], []
    for _ in range(ROUNDS):
        start = clock()
        communicator.allreduce([sample], [result], ReduceOp.SUM, 1.0, 1.0)
        middle = clock()
        communicator.allreduce_compressed([sample], [result], 1.0, 1.0, form, [None])
        as_it_is.append(middle - start)
        compressed.append(clock() - middle)
    plain, ours = min(as_it_is[1:]), min(compressed[1:])
    if communicator.rank == 0 and ours > plain:
        _log.warning(
            "compression to %s costs time between these hosts: %d MB take %.3g ms compressed and %.3g ms uncompressed. Use "
            "hvd.Compression.none, or unset %s.",
            form.name,
            SAMPLE_BYTES >> 20,
            ours * 1e3,
            plain * 1e3,
            COMPRESSION,
        )
