"""Keras on TensorFlow: gradients are reduced as ``horovod.tensorflow`` does it, in a graph while backward goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod._keras.distribution import Reducer, scaled
from horovod._keras.exchange import Identity
from horovod._keras.settings import Settings
from horovod.comm.reduction import ReduceOp
from horovod.tensorflow.training import reduced_marks
from horovod.tensorflow.training.gradients import Reduction, reduce_gradients


class TensorFlowReducer(Reducer):
    """One optimizer's gradients, traced into whatever graph is being built, or at once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._identity = Identity()
        self._made = reduced_marks.now()

    def reduced_before(self, gradient: Any, variable: Any) -> bool:
        return reduced_marks.take(gradient, variable, self._settings.process_set)

    def __call__(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        cut: Sequence[Sequence[int]] | None,
        op: ReduceOp,
        factor: float,
    ) -> list[Any]:
        settings = self._settings
        if op == ReduceOp.SUM:
            reduced_marks.check_sum(variables, settings.process_set, self._made)
        reduction = Reduction(
            op=op,
            predivide=settings.predivide if op == ReduceOp.AVERAGE else 1.0,
            compression=settings.compression,
            sparse_as_dense=settings.sparse_as_dense,
            groups=None if cut is None else [[variables[i] for i in members] for members in cut],
            process_set=settings.process_set,
            device_dense=settings.device_dense,
            device_sparse=settings.device_sparse,
        )
        signature = tuple(
            (str(each.dtype.name), tuple(variable.shape)) for each, variable in zip(gradients, variables, strict=True)
        )
        name = f"{self._identity.name(signature)}.{op.label}"
        results = reduce_gradients(gradients, variables, reduction, name, ignore_name_scope=True)
        return [scaled(gradient, factor) for gradient in results]
