"""Keras on PyTorch: gradients are reduced in place, through ``horovod.torch``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from horovod._bindings.optimizer_name import OptimizerName
from horovod._bindings.reductions import ReductionArguments
from horovod._keras.distribution import Reducer, variable_name
from horovod._keras.guarding import OptimizerGuard, of_torch
from horovod._keras.settings import KerasSettings
from horovod._models.arrival import Arrival
from horovod.comm.reduction import ReduceOp
from horovod.comparison import missing_gradients
from horovod.comparison.missing_gradients import GradientKind
from horovod.core.errors import MismatchError
from horovod.core.requests.handle import all_of
from horovod.torch.compression import Compression
from horovod.torch.ops.allreduce import grouped_allreduce_alike
from horovod.torch.ops.handles import synchronize
from horovod.torch.uncompiled import uncompiled

__all__ = ["Compression", "TorchReducer"]


@uncompiled  # a collective cannot be part of a compiled graph
class TorchReducer(Reducer):
    """Reduces one optimizer's gradients each time they are applied."""

    def __init__(self, settings: KerasSettings) -> None:
        self._settings = settings
        self._name = OptimizerName()

    def watch(self, variables: Sequence[Any]) -> None:
        for variable in variables:
            parameter = variable.value
            if parameter.requires_grad and not hasattr(parameter, _STATE):
                setattr(parameter, _STATE, None)
                parameter.register_post_accumulate_grad_hook(_note_gradient)

    def arrivals(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Arrival]:
        return [_arrival(gradient, each.value) for gradient, each in zip(gradients, variables, strict=True)]

    def applied(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        if self.guard is not None:
            dense = {index: each for index, each in enumerate(gradients) if each is not None and not each.is_sparse}
            self.guard.applied(dense, variables)
        return list(gradients)

    def hand_out(self, given: Sequence[Any], reduced: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Write the reduced values into the gradient tensors of the parameters, so that clipping these in place works."""
        results = []
        with torch.no_grad():
            for gradient, result, variable in zip(given, reduced, variables, strict=True):
                own = result if gradient is None or result is None else gradient.copy_(result)
                if gradient is None and own is not None:
                    variable.value.grad = own
                results.append(own)
                if own is not None:
                    setattr(variable.value, _STATE, _REDUCED)
        return results

    def __call__(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        cut: Sequence[Sequence[int]] | None,
        op: ReduceOp,
        factor: float,
    ) -> list[Any]:
        if self.guard is not None and op != ReduceOp.MAX:
            self.guard.check(variables)
            self._show(self.guard, gradients, variables)
        try:
            return self._reduce(gradients, variables, cut, op, factor)
        except MismatchError:
            called = f"{self._called(variables, op)}.missing_gradients"
            together = missing_gradients.exchange(_kinds(gradients), self._settings.process_set, called)
            if together is None:
                raise
        filled = [
            torch.zeros_like(variable.value) if gradient is None and kind else gradient
            for gradient, kind, variable in zip(gradients, together, variables, strict=True)
        ]
        return self._reduce(filled, variables, cut, op, factor)

    def _show(self, guard: OptimizerGuard, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        see = guard.see
        if see is not None:
            for gradient, variable in zip(gradients, variables, strict=True):
                if gradient is not None:
                    see(variable_name(variable), of_torch(gradient))

    def _called(self, variables: Sequence[Any], op: ReduceOp) -> str:
        signature = tuple((str(each.value.dtype), tuple(each.value.shape)) for each in variables)
        return f"{self._name.of(signature)}.{op.label}"

    def _reduce(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        cut: Sequence[Sequence[int]] | None,
        op: ReduceOp,
        factor: float,
    ) -> list[Any]:
        """Reduce these gradients. Raises MismatchError, and changes nothing, if ranks have those of different variables."""
        settings = self._settings
        result: list[Any] = list(gradients)
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        with torch.no_grad():
            sent = {index: settings.compression.compress(gradients[index].detach().contiguous()) for index in present}
            name, alike = self._called(variables, op), missing_gradients.describe(_kinds(gradients))
            prescale, postscale = settings.scales(op, factor)
            buckets = [range(len(gradients))] if cut is None else cut
            handles = []
            for number, members in enumerate(buckets):
                mine = [index for index in members if index in sent]
                # A bucket without gradients sends a zero, so that other ranks see which gradients this rank has.
                tensors = [sent[index][0] for index in mine] or [torch.zeros(1, device=variables[0].value.device)]
                labels = [f"gradient of {variable_name(variables[index])}" for index in mine] or ["no gradient"]
                handles.append(
                    grouped_allreduce_alike(
                        tensors,
                        labels,
                        f"{name}.{number}",
                        ReductionArguments(op, prescale, postscale, settings.process_set, settings.chosen_form),
                        alike,
                    )
                )
            all_of(functools.partial(synchronize, handle) for handle in handles)
            for index, (tensor, context) in sent.items():
                result[index] = settings.compression.decompress(tensor, context)
        return result


_STATE, _REDUCED = "_horovod_gradient", "reduced"
"""The attribute of a parameter with the state of its gradient: None, its version after the backward pass, or _REDUCED."""


@uncompiled
def _note_gradient(parameter: Any) -> None:
    """Called when a backward pass has added to a parameter's gradient."""
    setattr(parameter, _STATE, parameter.grad._version)


def _arrival(gradient: Any, parameter: Any) -> Arrival:
    state = getattr(parameter, _STATE, None)
    setattr(parameter, _STATE, None)
    if state is None:
        return Arrival.UNKNOWN
    if state == _REDUCED:
        return Arrival.REDUCED
    return Arrival.LOCAL if gradient is parameter.grad and gradient._version == state else Arrival.CHANGED


def _kinds(gradients: Sequence[Any]) -> list[GradientKind]:
    return [GradientKind.ABSENT if gradient is None else GradientKind.DENSE for gradient in gradients]
