"""Reduces gradients in host memory in place. The graphs of the JAX backend call it.

The name of a request contains that of the optimizer, so the gradients of two optimizers never mix.
"""

from __future__ import annotations

from collections.abc import Sequence

from horovod._keras.settings import Settings
from horovod.comm.datatypes import Array, data_type_of
from horovod.comm.reduction import ReduceOp
from horovod.common.optimizer_name import OptimizerName
from horovod.core.submission.collectives import prepared_allreduce
from horovod.core.submission.handle import all_of


class Exchange:
    """Reduces one optimizer's gradients, as NumPy arrays."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._name = OptimizerName()

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
            names: of the arrays, for errors.
            cut: the indices of the arrays of each request. None: one request for all arrays.
            factor: multiplies the result.

        Raises:
            HorovodInternalError: the job failed, or ranks disagree. The text names ranks, variables and lines.
        """
        settings = self._settings
        cut = [range(len(arrays))] if cut is None else cut
        signature = tuple((array.dtype.name, array.shape) for array in arrays)
        name = self._name.of(signature)
        prescale, postscale = settings.scales(op, factor)
        handles = []
        for number, members in enumerate(cut):
            tensors = [(names[i], data_type_of(arrays[i]), arrays[i].shape) for i in members]
            called = f"{name}.{op.label}.{number}"
            prepared = prepared_allreduce(called, tensors, op, prescale, postscale, settings.line)
            vectors = [arrays[i].reshape(-1) for i in members]
            handles.append(prepared.submit(settings.process_set.process_set_id, vectors, vectors))
        all_of(handle.wait for handle in handles)
