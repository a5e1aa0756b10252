"""Gradients in host memory, reduced in place as few requests: what the JAX backend's graphs call into.

Requests are made once and submitted again and again. Their names are the optimizer's own: two optimizers, two models or
a GAN never mix. Ranks that build the same optimizers in the same order get the same names, whatever their variables are
called (Keras numbers layers per process, so a rank that made one model more would call them differently).
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
"""Type and shape of every gradient."""

_counting = threading.Lock()


class Identity:
    """The name of one optimizer, the same on all ranks, different for every other optimizer of the job."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, Signature], str] = {}

    def name(self, signature: Signature) -> str:
        """The name in the running generation; given out when it is first asked for, in the order of the program.

        It does not tell the generation, since a graph that was traced in an earlier one has its name for life.
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
        """Reduce every array in place. All members of the process set call it with arrays of the same types and shapes.

        Args:
            arrays: C-contiguous.
            names: of their variables, for errors.
            cut: which arrays travel together, as indices; None: all.
            factor: multiplies the result.

        Raises:
            HorovodInternalError: the job failed, or ranks disagree; the text names ranks, variables and lines.
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
