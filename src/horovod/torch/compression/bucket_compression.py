"""Compression of gradients that remembers, or that takes several collectives: the interface.

A :class:`~horovod.torch.compression.Compressor` changes one tensor for the way and back and forgets it. A
:class:`BucketCompressor` reduces a bucket of gradients itself. It is a recipe: whatever it remembers from step to step (what
was lost on the way, a basis to start from) lives in a dictionary that the optimizer keeps for each parameter, and saves in its
``state_dict()``.

Its one method is a generator. It starts a collective, yields, and is resumed with the result when that is there; meanwhile
backward and the other buckets go on. The whole of "reduce without compression", for example, is::

    class Plain(hvd.BucketCompressor):
        def reduce(self, gradients, memory, collectives):
            yield collectives.allreduce(list(gradients.values()), "plain")

The first collective of a bucket starts inside backward, when its last gradient is ready. The others start in ``step()`` (or
``synchronize()``), which goes round all buckets until all are through.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Protocol

import torch


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> list[torch.Tensor]:
        """Its results, when they are there. Raises HorovodInternalError if it failed."""


class Collectives(Protocol):
    """What a compressor may do with the other ranks, in the optimizer's process set, for one bucket.

    Attributes:
        size: how many ranks there are.
        average: whether gradients are to be averaged; otherwise they are summed.
    """

    size: int
    average: bool

    def allreduce(self, tensors: Sequence[torch.Tensor], label: str) -> Pending:
        """Start to reduce contiguous tensors in place, averaging or summing as the optimizer does.

        Args:
            label: tells the collectives of one bucket's step apart; the same on every rank.
        """

    def allgather(self, tensors: Sequence[torch.Tensor], label: str) -> Pending:
        """Start to concatenate each tensor over the ranks along its first dimension; ranks that joined have no rows."""


Steps = Generator[Pending, list[torch.Tensor], None]


class BucketCompressor(ABC):
    """Derive from this to write a compressor with a memory, or one that takes several collectives.

    Every rank's optimizer is given one with the same settings.

    Attributes:
        common: the keys in parameters' memories whose values are alike on all ranks. A checkpoint of any rank serves all
            ranks for these; the others are a rank's own.
    """

    common: frozenset[str] = frozenset()

    @abstractmethod
    def reduce(
        self, gradients: Mapping[str, torch.Tensor], memory: Mapping[str, dict[str, Any]], collectives: Collectives
    ) -> Steps:
        """Overwrite this rank's gradients with (something close to) their average or sum over the ranks.

        Called without gradient tracking. It must leave the same bits on every rank, and do the same collectives on every
        rank, so it decides by shapes and by what was reduced, not by this rank's own gradients. A rank that joins misses
        steps of the others, so what was alike on all ranks may not be so afterwards.

        Args:
            gradients: by parameter name: dense and contiguous, the same names, shapes and dtypes on every rank.
            memory: by parameter name, a dictionary of the parameter's own: empty at first, and then as the last step left
                it. Put tensors there, or what else may go into a checkpoint.

        Yields:
            What a method of ``collectives`` returned; is resumed with the results.
        """

    def compress(self, tensor: torch.Tensor) -> Any:
        """Where a :class:`~horovod.torch.compression.Compressor` is expected.

        Raises:
            ValueError: always; single tensors have no memory.
        """
        raise ValueError(
            f"{type(self).__name__} keeps a memory from step to step, so it can compress an optimizer's gradients only: "
            "pass it to DistributedOptimizer"
        )


class Reduction:
    """A compressor at work on one bucket."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._pending: Pending | None = None
        self._error: BaseException | None = None
        self._resume(None)

    def advance(self) -> bool:
        """Wait for the collective under way and start the next; False when there is none, or something has failed."""
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
        """Go on to the end.

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
