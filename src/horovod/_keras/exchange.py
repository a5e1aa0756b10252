"""Reduces gradients in host memory in place. The graphs of the JAX backend call it.

A request is made once and submitted in every step. Its name contains that of the optimizer, so the gradients of two
optimizers never mix. Ranks that build the same optimizers in the same order use the same names. Names of variables are not
part of them: Keras numbers layers per process, so they differ on a rank that has built another model before.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from horovod._keras.settings import Settings
from horovod.comm.datatypes import Array, data_type_of
from horovod.comm.reduction import ReduceOp
from horovod.common.buckets import optimizer_name
from horovod.core.coordination.messages import Request
from horovod.core.lifecycle.context import running
from horovod.core.submission.collectives import allreduce_request, submit
from horovod.core.submission.handle import all_of
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
    """Reduces one optimizer's gradients, as NumPy arrays."""

    def __init__(self, settings: Settings, identity: Identity) -> None:
        self._settings = settings
        self._identity = identity
        self._requests: dict[tuple[str, ReduceOp, float, tuple[str, ...]], list[Request]] = {}

    def reduce(
        self,
        arrays: Sequence[Array],
        names: Sequence[str],
        cut: Sequence[Sequence[int]] | None,
        op: ReduceOp,
        factor: float,
    ) -> None:
        """Reduce every array in place. All members of the process set must call it with arrays of the same types and shapes.

        Args:
            arrays: C-contiguous.
            names: the names of the variables, for errors.
            cut: the indices of the arrays of each request. None: one request for all arrays.
            factor: multiplies the result.

        Raises:
            HorovodInternalError: the job failed, or ranks disagree. The text names ranks, variables and lines.
        """
        settings = self._settings
        cut = [range(len(arrays))] if cut is None else cut
        signature = tuple((array.dtype.name, array.shape) for array in arrays)
        name = self._identity.name(signature)
        key = (name, op, factor, tuple(names))
        requests = self._requests.get(key)
        if requests is None:
            prescale, postscale = settings.scales(op, factor)
            requests = self._requests[key] = [
                allreduce_request(
                    f"{name}.{op.label}.{number}",
                    [(f"gradient of {names[i]}", data_type_of(arrays[i]), arrays[i].shape) for i in members],
                    op,
                    prescale,
                    postscale,
                    settings.line,
                )
                for number, members in enumerate(cut)
            ]
        handles = []
        for request, members in zip(requests, cut, strict=True):
            tensors = [
                Tensor(arrays[i].reshape(-1), spec.data_type, spec.shape)
                for i, spec in zip(members, request.tensors, strict=True)
            ]
            handles.append(submit(settings.process_set.process_set_id, request, tensors, tensors))
        all_of(handle.wait for handle in handles)
