"""Averages gradients for ``DistributedOptimizer`` and ``DistributedTrainer``.

The gradients of all ranks are added up, and the optimizer's ``rescale_grad`` is divided by the number of ranks. Between
reduction and update, gradients are therefore sums, as existing scripts expect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from horovod._bindings.bucket_division import bucket_limit, cut, cut_by_groups
from horovod._bindings.optimizer_name import OptimizerName
from horovod._bindings.reduction_settings import ReductionSettings
from horovod._bindings.reductions import Average, Sum, check_members, check_predivide
from horovod.comparison.alike import Value
from horovod.comparison.guard import (
    ELEMENTS,
    Guard,
    beginnings,
    compared_parameters,
    contents,
    labels,
    names_of_all,
    numbers,
)
from horovod.comparison.looks import part_of
from horovod.comparison.rotation import LookedAt, TensorPart
from horovod.core.lifecycle.process_set import ProcessSet
from horovod.core.negotiation.messages import Operation, TensorSpec
from horovod.core.submission.collectives import prepared_call
from horovod.core.submission.prepared import Prepared
from horovod.mxnet.ops.allreduce import PREFIX
from horovod.mxnet.ops.arguments import factor, whole
from horovod.mxnet.ops.errors import of_both_kinds
from horovod.mxnet.ops.submission import in_place, specs, submit
from horovod.observe.call_site import caller


class Gradients:
    """Adds up the gradients of one optimizer over a process set.

    Each optimizer has its own requests, so those of two optimizers whose parameters have the same names are never confused. If
    a script has several optimizers of one kind, every rank must use them for the first time in the same order.

    Args:
        kind: a name for this kind of optimizer, the same on all ranks.
        predivide: gradients are divided by it before they are added up, and multiplied afterwards.
        num_groups: the number of groups into which the gradients of one call are divided; each group is one request per dtype.
            0: Horovod cuts by size.
        process_set: the ranks that train together.
        compression: the choice of ``compression=``; of it, only compression between hosts is carried out here.

    Raises:
        ValueError: an argument is wrong, or the process set is not registered.
    """

    def __init__(
        self, kind: str, predivide: Any, num_groups: Any, process_set: ProcessSet, compression: Any = None
    ) -> None:
        self._kind = kind
        predivide, groups = factor(predivide, "gradient_predivide_factor"), whole(num_groups, "num_groups")
        check_predivide(predivide, Average)
        if groups < 0:
            raise ValueError(f"num_groups={num_groups}: expected 0 or a positive number")
        check_members(Average, process_set)
        self._settings = ReductionSettings(
            predivide=predivide,
            groups=groups or None,
            process_set=process_set,
            line=caller(),
            compression=compression,
        )
        self._name = OptimizerName()
        self._guard = Guard(process_set, self._settings.line)

    def compare(self, optimizer: Any, weights: Mapping[str, Any]) -> None:
        """Compare hyper-parameters and a sample of the weights with those of the other ranks. Every member must call it once in
        each step, before :meth:`reduce`.

        Args:
            optimizer: the optimizer with the hyper-parameters.
            weights: by name. They are read only in the second step, and with ``HOROVOD_DEBUG`` at intervals.

        Raises:
            MismatchError: ranks differ, and ``HOROVOD_CHECK=error``.
        """
        chosen = compared_parameters(list(weights))

        def hyperparameters() -> dict[str, str]:
            values = {name: value for name, value in vars(optimizer).items() if not name.startswith("_")}
            counts = {name for name in values if name.endswith("num_update")}
            return numbers({**{name: values[name] for name in set(values) - counts}, "lr": optimizer.learning_rate})

        def parameters() -> dict[str, Value]:
            return beginnings([weights[name].reshape(-1)[:ELEMENTS].asnumpy() for name in chosen])

        def every() -> dict[str, str]:
            return contents([weight.asnumpy() for weight in weights.values()])

        named = dict(zip(labels(len(chosen)), (f"parameter {name}" for name in chosen), strict=True))
        if self._guard.debugs:
            named |= names_of_all([f"parameter {name}" for name in weights])
        with of_both_kinds():
            self._guard.step(self._kind, hyperparameters, parameters, named, every, _looked_at(weights))

    def applied(self, gradients: Mapping[str, Any]) -> None:
        """Let the ranks compare gradients that are about to be applied, and that the script may have changed since
        :meth:`reduce`. Every member must call it once in each step.

        Args:
            gradients: by the name of their parameter, in the order of the weights of :meth:`compare`.
        """
        self._guard.applied(_looked_at(gradients))

    def active(self) -> bool:
        """Whether this rank reduces gradients; see :meth:`ReductionSettings.active`."""
        return self._settings.active()

    def rescale(self) -> float:
        """The factor for ``rescale_grad`` that turns sums into averages."""
        settings = self._settings
        return settings.predivide / (settings.process_set.size() or 1) if self.active() else 1.0

    def reduce(self, names: Sequence[str], gradients: Sequence[Any]) -> None:
        """Add up gradients over the ranks, in place. Every member must call it with the same names, types and shapes.

        It returns immediately, and raises the errors of :func:`horovod.mxnet.ops.allreduce.allreduce_`. Each request contains
        gradients of one type. The class says how the gradients are divided into requests.

        Args:
            names: the names of the parameters, for errors and the timeline.
            gradients: the gradient of each parameter, a dense NDArray.
        """
        if self._guard.debugs:
            for name, gradient in zip(names, gradients, strict=True):
                self._guard.see(name, gradient.asnumpy())
        with of_both_kinds():
            tensors = [
                TensorSpec(f"{PREFIX}.{name}", spec.data_type, spec.shape)
                for name, gradient in zip(names, gradients, strict=True)
                for spec in specs([gradient], f"gradient of {name}")
            ]
            own, settings = self._name.of(self._kind), self._settings
            prescale, _ = settings.scales()  # the update multiplies by rescale_grad, in place of the postscale factor
            for number, members in enumerate(self._cut(tensors)):
                described = [tensors[index] for index in members]
                call = prepared_call(
                    Operation.ALLREDUCE,
                    "",
                    f"{own}.{names[0]}.{number}",
                    described,
                    Sum,
                    prescale,
                    line=settings.line,
                    labels=[each.name for each in described],
                    compression=settings.form,
                )
                self._submit(call, [gradients[index] for index in members], -min(members))

    def _cut(self, tensors: Sequence[TensorSpec]) -> list[list[int]]:
        groups = self._settings.groups
        if not isinstance(groups, int):
            sizes = [(each.data_type, each.data_type.itemsize * prod(each.shape)) for each in tensors]
            return cut(sizes, bucket_limit(on_processor=True))
        of_one_type: dict[object, list[int]] = {}
        for number, members in enumerate(cut_by_groups(range(len(tensors)), groups)):
            for index in members:
                of_one_type.setdefault((number, tensors[index].data_type), []).append(index)
        return list(of_one_type.values())

    def _submit(self, call: Prepared, gradients: list[Any], priority: int) -> None:
        members = self._settings.process_set
        errors = call.errors(members.process_set_id)
        in_place(gradients, lambda hosts: submit(members, call.request, hosts, hosts, priority, errors=errors))


def _looked_at(arrays: Mapping[str, Any]) -> LookedAt:
    """Dense arrays in host memory, by the names of their parameters, of which the guard looks at some."""
    in_order = list(arrays.items())

    def part(number: int, place: int) -> TensorPart | None:
        name, array = in_order[number]
        if array.context.device_type != "cpu" or array.stype != "default":
            return None
        begin, apart = part_of(array.size, place)
        copied = array.reshape(-1)[begin::apart].copy()  # by the engine, which no code waits for here
        return TensorPart(f"parameter {name}", np.dtype(array.dtype).name, copied.asnumpy)

    return LookedAt(len(in_order), part)
