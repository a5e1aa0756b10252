"""The interface of one submission's memory, which operations use and every kind of memory implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch

from horovod.core.requests.handle import Handle
from horovod.core.requests.tensor import Allocate, Tensor
from horovod.torch.ops.tensors import check_apart


class TorchMemory(Protocol):
    """The memory of one submission. All tensors must be on one device, and pass :func:`check`."""

    @property
    def device(self) -> str:
        """The kind of device, as ranks compare it."""

    def read(self, tensors: Sequence[torch.Tensor]) -> list[Tensor]:
        """The tensors' elements, for the collective to read."""

    def write(self, tensors: Sequence[torch.Tensor]) -> list[Tensor]:
        """The memory for the collective to write, which becomes the tensors' elements."""

    def reduce(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The memory to read and to write if each output is like its input, or is its input (``outputs is inputs``)."""

    def grow(self, tensors: Sequence[torch.Tensor], outputs: dict[int, torch.Tensor]) -> Allocate:
        """A function that makes outputs like ``tensors`` once their numbers of rows are known, and stores them in
        ``outputs``."""

    def arrive(self, handle: Handle) -> None:
        """Called when the handle is done: later work of the caller's current stream waits for the result."""

    def arrived(self, handle: Handle) -> bool:
        """Whether the result has arrived in the outputs. Called when the handle is done."""


def refuse_in_capture(capturing: bool) -> None:
    """Raise ValueError, with advice, if the calling thread's stream is being captured into a graph."""
    if capturing:
        raise ValueError(
            "a collective cannot be captured in a CUDA graph, since the ranks agree on each anew. Capture forward and backward "
            "without it, and call hvd.allreduce, hvd.synchronize or optimizer.step() between replays; with "
            "hvd.DistributedOptimizer capture inside optimizer.no_sync()"
        )


class InPlace(ABC):
    """Memory that the collective reads and writes without copies: host memory, and device memory that an engine moves."""

    @abstractmethod
    def view(self, tensor: torch.Tensor) -> Tensor:
        """One tensor as the core takes it."""

    def read(self, tensors: Sequence[torch.Tensor]) -> list[Tensor]:
        return [self.view(tensor) for tensor in tensors]

    write = read

    def reduce(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        sources = self.read(inputs)
        if outputs is inputs:
            check_apart(inputs)
            return sources, sources
        return sources, self.read(outputs)
