"""The interface of one submission's memory. Operations use it, and every kind of memory implements it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch

from horovod.core.requests.handle import Handle
from horovod.core.requests.tensor import Allocate, Tensor
from horovod.torch.tensors import check_apart


class TorchMemory(Protocol):
    """The memory of one submission. All tensors must be on one device, and pass :func:`check`."""

    @property
    def device(self) -> str:
        """The kind of device in requests, which ranks compare."""

    def read(self, tensors: Sequence[torch.Tensor]) -> list[Tensor]:
        """The tensors' elements, for the collective to read."""

    def write(self, tensors: Sequence[torch.Tensor]) -> list[Tensor]:
        """The memory for the collective to write. Its contents become the tensors' elements."""

    def reduce(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The memory to read and the memory to write, for a collective whose outputs have the shapes and types of its inputs.

        For a collective in place, pass the same list twice (``outputs is inputs``).
        """

    def grow(self, tensors: Sequence[torch.Tensor], outputs: dict[int, torch.Tensor]) -> Allocate:
        """A function that makes outputs like ``tensors`` once their numbers of rows are known, and stores them by index in
        ``outputs``."""

    def arrive(self, handle: Handle) -> None:
        """Called when the handle is done. Makes later work of the caller's current stream wait for the result."""

    def arrived(self, handle: Handle) -> bool:
        """Whether the result has arrived in the outputs. Called when the handle is done."""


def refuse_in_capture(capturing: bool) -> None:
    """Raise ValueError, with advice, if the calling thread's stream is being captured into a graph."""
    if capturing:
        raise ValueError(
            "a collective cannot be captured in a CUDA graph, because the ranks agree on every call of it. Capture forward and "
            "backward without it, and call hvd.allreduce, hvd.synchronize or optimizer.step() between replays; with "
            "hvd.DistributedOptimizer, capture inside optimizer.no_sync()"
        )


class InPlace(ABC):
    """Memory that the collective reads and writes without copies: host memory, and device memory that an engine moves."""

    @abstractmethod
    def view(self, tensor: torch.Tensor) -> Tensor:
        """One tensor as a tensor of the core."""

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
