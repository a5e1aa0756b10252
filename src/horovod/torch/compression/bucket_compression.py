"""The interface of compressors that keep state from step to step, or that need several collectives.

A :class:`~horovod.torch.compression.Compressor` compresses one tensor, and keeps no state. A :class:`BucketCompressor` reduces
a bucket of gradients itself. It keeps its state (the error of the last step, a basis to start from) in a dictionary for each
parameter. The optimizer owns these dictionaries, and saves them in its ``state_dict()``.

Its only method is a generator. It starts a collective and yields it. The optimizer resumes the generator with the results of
the collective. Meanwhile backward and the reductions of other buckets continue. For example, a reduction without compression
is::

    class Plain(hvd.BucketCompressor):
        def reduce(self, gradients, memory, collectives):
            yield collectives.allreduce(list(gradients.values()), "plain")

The first collective of a bucket starts inside backward, when its last gradient is ready. The others start at the end of the
backward pass; for gradients that the script has set itself, they start in ``step()`` or ``synchronize()``. There the optimizer
resumes the generators of all buckets, one after another, until all have ended.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Protocol

import torch


class Pending(Protocol):
    """A running collective."""

    def wait(self) -> list[torch.Tensor]:
        """Wait, and return the results. Raises HorovodInternalError if the collective failed."""


class Collectives(Protocol):
    """The collectives that a compressor may start for one bucket, over the optimizer's process set.

    Attributes:
        size: the number of ranks.
        average: whether gradients are averaged; otherwise they are summed.
    """

    size: int
    average: bool

    def allreduce(self, tensors: Sequence[torch.Tensor], label: str) -> Pending:
        """Start to reduce contiguous tensors in place, to averages or sums as the optimizer does.

        Args:
            label: distinguishes the collectives of one bucket in a step; the same on every rank.
        """

    def allgather(self, tensors: Sequence[torch.Tensor], label: str) -> Pending:
        """Start to concatenate each tensor over the ranks along its first dimension. Ranks that have joined add no rows."""


Steps = Generator[Pending, list[torch.Tensor], None]


class BucketCompressor(ABC):
    """The base class of compressors that keep state, or that need several collectives.

    Pass one with the same settings to the optimizer of every rank.

    Attributes:
        common: the keys of the state whose values are equal on all ranks, so that a checkpoint of any rank restores them on
            all ranks. All other values belong to one rank.
    """

    common: frozenset[str] = frozenset()

    @abstractmethod
    def reduce(
        self, gradients: Mapping[str, torch.Tensor], memory: Mapping[str, dict[str, Any]], collectives: Collectives
    ) -> Steps:
        """Overwrite this rank's gradients with their average or sum over the ranks, or with an approximation of it.

        Called without gradient tracking. It must write the same bits and run the same collectives on every rank, so its
        decisions may depend on shapes and on reduced values, never on this rank's own gradients. A rank that has joined
        (``hvd.join()``) misses steps of the others. Afterwards the values of ``common`` may differ between ranks.

        Args:
            gradients: by parameter name; dense and contiguous, with the same names, shapes and dtypes on every rank.
            memory: by parameter name, a dictionary with the state of the parameter. It is empty in the first step, and
                keeps what later steps put there: tensors, or other values that a checkpoint may contain.

        Yields:
            The return values of methods of ``collectives``. The generator is resumed with the results.
        """

    def compress(self, tensor: torch.Tensor) -> Any:
        """Not supported: operations call it, and single tensors have no state.

        Raises:
            ValueError: always. The text says where to pass the compressor.
        """
        raise ValueError(
            f"{type(self).__name__} keeps state from step to step, so it can only compress the gradients of an optimizer: "
            "pass it to DistributedOptimizer"
        )


class BucketReduction:
    """The running reduction of one bucket by a compressor. Creating it starts the first collective."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._pending: Pending | None = None
        self._error: BaseException | None = None
        self._resume(None)

    def advance(self) -> bool:
        """Wait for the running collective, and start the next one. Returns whether a collective is running then."""
        if self._pending is None:
            return False
        try:
            results = self._pending.wait()
        except BaseException as error:
            self._pending, self._error = None, error
            self._steps.close()
            return False
        self._resume(results)
        return self._pending is not None

    def wait(self) -> None:
        """Wait until the reduction is complete.

        Raises:
            HorovodInternalError: a collective failed.
        """
        while self.advance():
            pass
        if self._error is not None:
            raise self._error

    @torch.no_grad()
    def _resume(self, results: Any) -> None:
        try:
            self._pending = self._steps.send(results)
        except StopIteration:
            self._pending = None
        except BaseException as error:
            self._pending, self._error = None, error
