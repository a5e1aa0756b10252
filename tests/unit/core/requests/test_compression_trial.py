"""Whether compression pays is found out once, by all ranks in the same batch, and only rank 0 says so."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from horovod.comm.compression.block_reduction import Errors
from horovod.comm.compression.blocks import FORMATS, BlockFormat
from horovod.comm.reduction import ReduceOp
from horovod.comm.single import SingleCommunicator
from horovod.comm.spans import Vectors
from horovod.core.requests.compression_trial import ROUNDS, SAMPLE_BYTES, try_compression


class Timed(SingleCommunicator):
    """Its collectives take the given seconds of a clock of its own, and what they slow down in the first round."""

    def __init__(self, rank: int, plain: float, compressed: float) -> None:
        super().__init__()
        self.rank = rank
        self.seconds = {"plain": plain, "compressed": compressed}
        self.calls: list[str] = []
        self.now = 0.0

    def spend(self, kind: str, vectors: Vectors) -> None:
        assert sum(each.nbytes for each in vectors) == SAMPLE_BYTES
        self.now += self.seconds[kind] + (100.0 if kind not in self.calls else 0.0)
        self.calls.append(kind)

    def allreduce(self, inputs: Vectors, outputs: Vectors, op: ReduceOp, prescale: float, postscale: float) -> None:
        self.spend("plain", inputs)

    def allreduce_compressed(
        self, inputs: Vectors, outputs: Vectors, prescale: float, postscale: float, form: BlockFormat, errors: Errors
    ) -> None:
        self.spend("compressed", inputs)


@pytest.mark.parametrize(
    ("rank", "plain", "compressed", "warns"), [(0, 2, 3, True), (0, 3, 2, False), (1, 2, 3, False)]
)
def test_a_loss_is_said_once_by_the_first_rank(
    rank: int, plain: float, compressed: float, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    communicator = Timed(rank, plain, compressed)
    batch = [np.zeros(SAMPLE_BYTES // 8, np.float32), np.zeros(SAMPLE_BYTES // 8 + 1, np.float32)]
    with caplog.at_level(logging.WARNING, "horovod.core"):
        for _ in range(2):
            try_compression(communicator, batch, FORMATS["int8"], lambda: communicator.now)
    assert communicator.calls == ["plain", "compressed"] * ROUNDS
    assert ("int8 costs time between these hosts: 8 MB take 3e+03 ms compressed and 2e+03 ms" in caplog.text) == warns


def test_small_batches_are_not_compared() -> None:
    communicator = Timed(0, 1, 1)
    try_compression(communicator, [np.zeros(SAMPLE_BYTES // 4 - 1, np.float32)], FORMATS["int8"])
    assert not communicator.calls
