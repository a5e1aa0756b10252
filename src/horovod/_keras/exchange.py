"""Reduces gradients in place, in host memory or in that of a GPU. The graphs of the JAX backend call it.

A request is made once and submitted in every step. Its name contains that of the optimizer, so the gradients of two
optimizers never mix. Ranks that build the same optimizers in the same order use the same names. Names of variables are not
part of them: Keras numbers layers per process, so they differ on a rank that has built another model before.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from horovod._keras.settings import Settings
from horovod.comm.reduction import ReduceOp
from horovod.common.buckets import optimizer_name
from horovod.core.coordination.messages import Request
from horovod.core.lifecycle.context import running
from horovod.core.submission.collectives import allreduce_request, submit
from horovod.core.submission.devices import Reduction
from horovod.core.submission.handle import Handle, all_of
from horovod.core.submission.prepared import device_of
from horovod.core.submission.tensor import Tensor

Signature = tuple[tuple[str, tuple[int, ...]], ...]
"""The type and shape of every gradient."""

_counting = threading.Lock()


class Identity:
    """The name of one optimizer. It is the same on all ranks, and no other optimizer of the job has it."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, Signature], str] = {}

    def name(self, signature: Signature) -> str:
        """The name in the running generation. Optimizers are numbered in the order in which the script first uses them.

        The generation is not part of the name, because a traced graph keeps its name in later generations.
        """
        generation = running().generation
        with _counting:
            name = self._names.get((generation, signature))
            if name is None:
                name = self._names[generation, signature] = optimizer_name(signature)
            return name


class Exchange:
    """Reduces one optimizer's gradients, as the core takes them."""

    def __init__(self, settings: Settings, identity: Identity) -> None:
        self._settings = settings
        self._identity = identity
        self._requests: dict[tuple[str, ReduceOp, float, str, tuple[str, ...]], list[Request]] = {}

    def reduction(self, op: ReduceOp, factor: float) -> Reduction:
        """What :meth:`reduce` asks of the engine."""
        return Reduction(op, *self._settings.scales(op, factor))

    def reduce(
        self,
        tensors: Sequence[Tensor],
        names: Sequence[str],
        cut: Sequence[Sequence[int]] | None,
        op: ReduceOp,
        factor: float,
    ) -> None:
        """Reduce every tensor in place. All members of the process set must call it with tensors of the same types and shapes.

        On a device, what the calling thread's current stream is given from now on comes after the reduction.

        Args:
            tensors: all in host memory, or all of one submission on a device.
            names: the names of the variables, for errors.
            cut: the indices of the tensors of each request. None: one request for all tensors.
            factor: multiplies the result.

        Raises:
            HorovodInternalError: the job failed, or ranks disagree. The text names ranks, variables and lines.
        """
        settings = self._settings
        cut = [range(len(tensors))] if cut is None else cut
        signature = tuple((tensor.data_type.numpy.name, tensor.shape) for tensor in tensors)
        name = self._identity.name(signature)
        device = device_of(tensors)
        key = (name, op, factor, device, tuple(names))
        requests = self._requests.get(key)
        if requests is None:
            prescale, postscale = settings.scales(op, factor)
            requests = self._requests[key] = [
                allreduce_request(
                    f"{name}.{op.label}.{number}",
                    [(f"gradient of {names[i]}", tensors[i].data_type, tensors[i].shape) for i in members],
                    op,
                    prescale,
                    postscale,
                    settings.line,
                    device=device,
                )
                for number, members in enumerate(cut)
            ]
        handles: list[Handle] = []
        try:
            for request, members in zip(requests, cut, strict=True):
                own = [tensors[i] for i in members]
                handles.append(submit(settings.process_set.process_set_id, request, own, own))
        finally:
            try:
                all_of(handle.wait for handle in handles)
            finally:  # also after an error, as the memory is used for something else then
                for handle in handles:
                    if handle.event is not None:
                        handle.event.wait()
