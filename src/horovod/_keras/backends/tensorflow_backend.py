"""Keras on TensorFlow: ``horovod.tensorflow`` reduces the gradients; in a graph, while backward continues."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from horovod._bindings.optimizer_name import OptimizerName
from horovod._keras.distribution import Reducer, scaled
from horovod._keras.settings import KerasSettings
from horovod._models.arrival import Arrival
from horovod.comm.reduction import ReduceOp
from horovod.tensorflow import reduced_marks
from horovod.tensorflow.graph.counted_names import counted
from horovod.tensorflow.training.gradients import TensorFlowReduction, reduce_gradients
from horovod.tensorflow.training.step_watch import StepWatch, looked_at


def reduction_of(settings: KerasSettings, **changes: Any) -> TensorFlowReduction:
    """The settings of a Keras optimizer for :func:`reduce_gradients`, with ``changes``."""
    same = {field.name: getattr(settings, field.name) for field in dataclasses.fields(TensorFlowReduction)}
    return TensorFlowReduction(**{**same, **changes})


class TensorFlowReducer(Reducer):
    """Reduces one optimizer's gradients: in the graph that is being built, or eagerly."""

    def __init__(self, settings: KerasSettings) -> None:
        self._settings = settings
        self._name = OptimizerName()
        self._made = reduced_marks.next_number()
        reduced_marks.watch_tapes()

    def arrivals(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Arrival]:
        members = self._settings.process_set
        pairs = zip(gradients, variables, strict=True)
        return [reduced_marks.arrival(gradient, variable, members, self._made) for gradient, variable in pairs]

    def applied(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        guard = self.guard
        if guard is None:
            return list(gradients)
        return looked_at(gradients, lambda found: guard.applied(found, variables))

    def hand_out(self, given: Sequence[Any], reduced: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        reduced_marks.mark(reduced, variables, self._settings.process_set)
        return list(reduced)

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
        reduction = reduction_of(
            settings,
            op=op,
            predivide=settings.predivide if op == ReduceOp.AVERAGE else 1.0,
            groups=None if cut is None else [[variables[i] for i in members] for members in cut],
        )
        signature = tuple((str(getattr(each.dtype, "name", each.dtype)), tuple(each.shape)) for each in variables)
        name = f"{counted(lambda: self._name.of(signature))}.{op.label}"
        guard = None if op == ReduceOp.MAX else self.guard
        if guard is not None:
            counted(lambda: guard.choose_name(variables))
        results = reduce_gradients(
            gradients,
            variables,
            reduction,
            name,
            ignore_name_scope=True,
            watch=None if guard is None else StepWatch(lambda: guard.check(variables), guard.see),
        )
        return [None if gradient is None else scaled(gradient, factor) for gradient in results]
