"""``DistributedOptimizer`` for Keras 2 (``tf_keras``): its optimizers of TensorFlow 2.11 and newer, and the older ones.

Gradients are reduced in ``minimize``, which ``fit`` calls, and in ``apply_gradients`` if they are not reduced by then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from horovod._bindings.local_gradients import reduce_shared
from horovod._bindings.optimizer_name import OptimizerName
from horovod._bindings.reductions import Sum
from horovod._keras.backends.tensorflow_backend import reduction_of
from horovod._keras.compilation import turn_off_xla
from horovod._keras.guarding import OptimizerGuard
from horovod._keras.loss_scale import is_distributed, unwrapped
from horovod._keras.settings import MODULE, KerasSettings, users_objects
from horovod._models.arrival import Arrival, ChangeWarning
from horovod.common.basics import rank
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from horovod.tensorflow.graph.counted_names import counted
from horovod.tensorflow.reduced_marks import arrival, mark, next_number, watch_tapes
from horovod.tensorflow.training.gradients import reduce_gradients
from horovod.tensorflow.training.local_sources import LocalSources
from horovod.tensorflow.training.step_watch import StepWatch

Apply = Callable[[Sequence[tuple[Any, Any]]], Any]
"""Applies pairs of (gradient, variable)."""


class LegacyDistribution:
    """The distributed part of one optimizer.

    Args:
        optimizer: the distributed optimizer.
        settings: its arguments.
        kind: the name of its class.
    """

    def __init__(self, optimizer: Any, settings: KerasSettings, kind: str) -> None:
        self._optimizer = optimizer
        self.guard = OptimizerGuard(optimizer, settings)
        self._reduction = reduction_of(settings)
        self._name = OptimizerName()
        self._kind = kind
        self._local = LocalSources(settings.process_set, settings.scale_local)
        self._warning = ChangeWarning("apply_gradients() of the distributed optimizer")
        self._made = next_number()
        self._computed = False  # whether compute_gradients() was called after the last apply_gradients()
        watch_tapes()
        self._aggregation: LocalGradientAggregationHelper | None = None
        if settings.passes > 1:
            self._aggregation = LocalGradientAggregationHelper(
                settings.passes,
                self._by_method,
                settings.sparse_as_dense,
                settings.average_aggregated,
                rank(),
                None,
                settings.process_set,
                settings.scale_local,
                f"Distributed{kind}",
            )
            self._aggregation.absent_too = True

    def keep_local(self, variable: Any) -> None:
        """Do not reduce the gradients of ``variable``."""
        self._local.add(variable)
        if self._aggregation is not None:
            self._aggregation.register_local_var(variable)

    def keep_layers_local(self, layers: Sequence[Any]) -> None:
        """Do not reduce the gradients of these layers' trainable weights, also of weights that a layer makes later."""
        self._local.add_layers(layers)
        if self._aggregation is not None:
            self._aggregation.register_local_layers(layers)

    def _by_method(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduce gradients with the optimizer's method. A method that overrides it gets no gradient that is None."""
        results: list[Any] = list(gradients)
        own = type(self._optimizer)._allreduce is _LegacyOptimizerOverrides._allreduce
        chosen = [index for index, gradient in enumerate(results) if own or gradient is not None]
        reduced = self._optimizer._allreduce(
            [results[index] for index in chosen], [variables[index] for index in chosen]
        )
        for index, gradient in zip(chosen, reduced, strict=True):
            results[index] = gradient
        return results

    def allreduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduce gradients over the ranks. Those of local variables are scaled, and stay on their rank.

        A script's ``_allreduce`` may register local variables, and pass them on. Other ranks need not have them.
        """
        kept = self._local.kept(gradients, variables)
        return reduce_shared(
            gradients,
            kept,
            lambda shared: self._allreduce([gradients[i] for i in shared], [variables[i] for i in shared]),
        )

    def _allreduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        signature = tuple((str(each.dtype), tuple(each.shape.as_list())) for each in variables)
        name = f"Distributed{self._kind}_{counted(lambda: self._name.of(signature))}"
        guard = self.guard
        counted(lambda: guard.choose_name(variables))
        return reduce_gradients(
            gradients,
            variables,
            self._reduction,
            name,
            ignore_name_scope=True,
            watch=StepWatch(lambda: guard.check(variables), guard.see) if _readable(variables) else None,
        )

    def reduce(self, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Takes pairs of (gradient, variable), and returns them with the gradients to apply."""
        self._computed = True
        return self._reduce(pairs, self._arrivals(pairs))

    def _arrivals(self, pairs: Sequence[tuple[Any, Any]]) -> dict[int, Arrival]:
        """The states of the gradients that are not None, by index."""
        members = self._reduction.process_set
        return {
            index: arrival(gradient, variable, members, self._made)
            for index, (gradient, variable) in enumerate(pairs)
            if gradient is not None
        }

    def _reduce(self, pairs: Sequence[tuple[Any, Any]], arrivals: Mapping[int, Arrival]) -> list[tuple[Any, Any]]:
        gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        before = {index for index, arrived in arrivals.items() if arrived is Arrival.REDUCED}
        if self._aggregation is not None:
            if before and self._reduction.op == Sum:
                raise ValueError(
                    "DistributedGradientTape has reduced these gradients already, and this optimizer with "
                    "backward_passes_per_step > 1 and op=hvd.Sum would sum them over the ranks again; pass it a "
                    "tf.GradientTape"
                )
            result = self._aggregation.compute_gradients(gradients, variables)
        else:
            kept = self._local.kept(gradients, variables) | {index: gradients[index] for index in before}
            if before and len(kept) + gradients.count(None) >= len(gradients):
                kept.update({index: None for index, each in enumerate(gradients) if each is None})
            result = reduce_shared(
                gradients,
                kept,
                lambda shared: self._by_method([gradients[i] for i in shared], [variables[i] for i in shared]),
            )
        if self._reduction.active():
            mark(result, variables, self._reduction.process_set)
        return list(zip(result, variables, strict=True))

    def reduce_for_script(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduce gradients that the script changes before it applies them.

        Raises:
            ValueError: ``backward_passes_per_step`` is greater than 1.
        """
        if self._aggregation is not None:
            raise ValueError(
                "hvd.reduce_gradients cannot be used with backward_passes_per_step > 1; accumulate the gradients yourself"
            )
        return [gradient for gradient, _ in self.reduce(list(zip(gradients, variables, strict=True)))]

    def apply(self, optimizer: Any, pairs: Sequence[tuple[Any, Any]], aggregated: bool, apply: Apply) -> Any:
        """Reduce the gradients that were not reduced yet, and call ``apply`` with the result.

        With several backward passes per step, it calls ``apply`` only after the last.

        Args:
            optimizer: the optimizer, which counts steps.
            pairs: pairs of (gradient, variable).
            aggregated: whether the script says that it has reduced the gradients.
            apply: applies the pairs that it gets.
        """
        if self._reduction.active() and not aggregated:
            arrivals = self._arrivals(pairs)
            local = self._local.kept([each for each, _ in pairs], [each for _, each in pairs])
            waiting = [index for index, arrived in arrivals.items() if arrived is not Arrival.REDUCED]
            missed = self._aggregation is not None and not self._computed
            if missed or any(index not in local for index in waiting) or not arrivals:
                changed = [index for index in waiting if arrivals[index] is Arrival.CHANGED and index not in local]
                self._warning.give([str(getattr(pairs[index][1], "name", "a variable")) for index in changed])
                pairs = self._reduce(pairs, arrivals)
        self._computed = False
        if self._aggregation is None:
            return apply(pairs)
        return self._aggregation.apply_gradients(lambda: apply(pairs), optimizer)


def _readable(variables: Sequence[Any]) -> bool:
    """Whether variables have values outside of graphs, unlike those of TensorFlow 1."""
    return all(hasattr(getattr(each, "handle", None), "numpy") for each in variables)


class _LegacyOptimizerOverrides:
    """The methods that override those of the wrapped optimizer's class."""

    _HAS_AGGREGATE_GRAD = True
    _horovod: LegacyDistribution

    def register_local_var(self, var: Any) -> None:
        """Do not reduce the gradient of ``var``. With ``scale_local_gradients`` it is divided by the number of ranks."""
        self._horovod.keep_local(var)

    def _allreduce(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        """Reduce gradients. Every reduction of this optimizer comes through here, so a script may override it."""
        return self._allreduce_grads(grads, vars)

    def _allreduce_grads(self, grads: Sequence[Any], vars: Sequence[Any], use_generic_names: bool = False) -> list[Any]:
        """Reduce gradients.

        Args:
            use_generic_names: accepted for compatibility. Names do not depend on the graph.
        """
        return self._horovod.allreduce(grads, vars)

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce the gradients that are not reduced yet, and apply all. :meth:`minimize` passes reduced gradients."""
        base: Any = super()
        aggregated = kwargs.get("skip_gradients_aggregation") or not kwargs.get(
            "experimental_aggregate_gradients", True
        )
        return self._horovod.apply(
            self, list(grads_and_vars), bool(aggregated), lambda pairs: base.apply_gradients(pairs, *args, **kwargs)
        )


class _New(_LegacyOptimizerOverrides):
    """Optimizers of TensorFlow 2.11 and newer."""

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> list[tuple[Any, Any]]:
        """Gradients of ``loss``, reduced over the ranks."""
        base: Any = super()
        return self._horovod.reduce(base.compute_gradients(loss, var_list, tape))


class _Old(_LegacyOptimizerOverrides):
    """Optimizers of ``tf.keras.optimizers.legacy``."""

    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> Any:
        base: Any = super()
        return self._horovod.reduce(base._compute_gradients(loss, var_list, grad_loss, tape))

    def get_gradients(self, loss: Any, params: Any) -> list[Any]:
        """Gradients of ``loss`` in a graph of TensorFlow 1, reduced over the ranks."""
        base: Any = super()
        pairs = list(zip(base.get_gradients(loss, params), params, strict=True))
        return [gradient for gradient, _ in self._horovod.reduce(pairs)]


_derived: dict[type[Any], type[Any]] = {}


def derived(kind: type[Any]) -> type[Any]:
    """The class of distributed optimizers that behave like ``kind``. It has the same name and is derived from ``kind``.

    It is saved under the name of ``kind``, so that Keras loads the file without Horovod.
    """
    if kind not in _derived:
        front = _New if hasattr(kind, "compute_gradients") else _Old
        names = {name: value for name, value in vars(kind).items() if name.startswith("_keras_api_names")}
        _derived[kind] = type(kind.__name__, (front, kind), {"__module__": MODULE, "__doc__": kind.__doc__, **names})
    return _derived[kind]


def distribute(optimizer: Any, settings: KerasSettings) -> Any:
    """A distributed optimizer with the configuration of ``optimizer``, which is not changed.

    Raises:
        ValueError: ``optimizer`` is not an optimizer of Keras 2, or it is distributed already.
    """
    if not hasattr(optimizer, "apply_gradients") or not hasattr(optimizer, "get_config"):
        raise ValueError(f"expected an instance of tf.keras.optimizers.Optimizer, not {type(optimizer).__name__}")
    if is_distributed(optimizer):
        raise ValueError("this optimizer is a DistributedOptimizer already; wrap the original")
    config = optimizer.get_config()
    if isinstance(config.get("learning_rate"), dict):
        hyper = getattr(optimizer, "_hyper", None)
        config["learning_rate"] = optimizer._learning_rate if hyper is None else hyper["learning_rate"]
    made = derived(type(optimizer)).from_config(config)
    for name, value in vars(optimizer).items():
        if name.startswith("_exclude_from_weight_decay"):
            setattr(made, name, value)
    return adopt(made, settings)


def distribute_in_place(optimizer: Any, settings: KerasSettings) -> Any:
    """Make ``optimizer`` itself distributed. It keeps its state."""
    optimizer.__class__ = derived(type(optimizer))
    return adopt(optimizer, settings)


def adopt(optimizer: Any, settings: KerasSettings) -> Any:
    """Set up an instance of a derived class to reduce gradients."""
    kind = type(optimizer).__name__
    object.__setattr__(optimizer, "_horovod", LegacyDistribution(optimizer, settings, kind))
    object.__setattr__(optimizer, "_name", settings.name or f"Distributed{kind}")
    turn_off_xla(tf.keras.Model)
    return optimizer


def load(keras: Any, filepath: Any, custom_optimizers: Any, custom_objects: Any, settings: KerasSettings) -> Any:
    """Load a model with Keras 2, and make its optimizer distributed. The optimizer keeps its state."""
    model = keras.models.load_model(filepath, custom_objects=users_objects(custom_optimizers, custom_objects))
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not is_distributed(optimizer):
        distribute_in_place(unwrapped(optimizer), settings)
    return model
