"""``DistributedOptimizer`` for Keras 2 (``tf_keras``): its optimizers of TensorFlow 2.11 and newer, and their predecessors.

Gradients are reduced where they are computed: in ``minimize``, which ``fit`` calls. A training loop of one's own takes
``horovod.tensorflow.DistributedGradientTape``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod._keras.compilation import leave_out_xla
from horovod._keras.exchange import Identity
from horovod._keras.loss_scale import unwrapped
from horovod._keras.settings import MODULE, Settings, users_objects
from horovod.common.basics import rank
from horovod.common.local_gradients import reduce_shared
from horovod.common.reductions import Sum
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from horovod.tensorflow.training.gradients import Reduction, reduce_gradients
from horovod.tensorflow.training.local import LocalSources
from horovod.tensorflow.training.reduced_marks import take


class LegacyDistribution:
    """The distributed part of one optimizer."""

    def __init__(self, settings: Settings, kind: str) -> None:
        self._reduction = Reduction(
            op=settings.op,
            predivide=settings.predivide,
            compression=settings.compression,
            sparse_as_dense=settings.sparse_as_dense,
            groups=settings.groups,
            process_set=settings.process_set,
            device_dense=settings.device_dense,
            device_sparse=settings.device_sparse,
        )
        self._identity = Identity()
        self._kind = kind
        self._local = LocalSources(settings.process_set, settings.scale_local)
        self._local_layers: list[Any] = []
        self._aggregation: LocalGradientAggregationHelper | None = None
        if settings.passes > 1:
            self._aggregation = LocalGradientAggregationHelper(
                settings.passes,
                self.allreduce,
                settings.sparse_as_dense,
                settings.average_aggregated,
                rank(),
                None,
                settings.process_set,
                settings.scale_local,
                f"Distributed{kind}",
            )

    def keep_local(self, variable: Any) -> None:
        """Leave gradients of ``variable`` to each rank."""
        self._local.add(variable)
        if self._aggregation is not None:
            self._aggregation.register_local_var(variable)

    def keep_layers_local(self, layers: Sequence[Any]) -> None:
        """Leave gradients of whatever trainable weights these layers have, or will have once they are built."""
        self._local_layers.extend(layers)

    def allreduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients of all ranks."""
        signature = tuple((str(each.dtype), tuple(each.shape.as_list())) for each in variables)
        name = f"Distributed{self._kind}_{self._identity.name(signature)}"
        return reduce_gradients(gradients, variables, self._reduction, name, ignore_name_scope=True)

    def reduce(self, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """``(gradient, variable)`` with gradients to apply."""
        gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        for layer in self._local_layers:
            for weight in layer.trainable_weights:
                self.keep_local(weight)
        members = self._reduction.process_set
        before = {index for index, (gradient, variable) in enumerate(pairs) if take(gradient, variable, members)}
        if self._aggregation is not None:
            if before and self._reduction.op == Sum:
                raise ValueError(
                    "DistributedGradientTape has reduced these gradients already, and this optimizer with "
                    "backward_passes_per_step > 1 and op=hvd.Sum would add them up over the ranks once more; pass it a "
                    "tf.GradientTape"
                )
            return list(zip(self._aggregation.compute_gradients(gradients, variables), variables, strict=True))
        kept = self._local.kept(gradients, variables) | {index: gradients[index] for index in before}
        result = reduce_shared(
            gradients,
            kept,
            lambda shared: self.allreduce([gradients[i] for i in shared], [variables[i] for i in shared]),
        )
        return list(zip(result, variables, strict=True))

    def apply(self, optimizer: Any, apply: Callable[[], Any]) -> Any:
        """Apply what :meth:`reduce` returned, if it is time to."""
        return apply() if self._aggregation is None else self._aggregation.apply_gradients(apply, optimizer)


class _InFront:
    """The methods in front of the optimizer's own. Never instantiated under this name."""

    _HAS_AGGREGATE_GRAD = True
    _horovod: LegacyDistribution

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of ``var`` to each rank; it is divided by the number of ranks if ``scale_local_gradients``."""
        self._horovod.keep_local(var)

    def _allreduce(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        return self._horovod.allreduce(grads, vars)

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply gradients that :meth:`minimize` has reduced; those of other origin as they are."""
        base: Any = super()
        pairs = list(grads_and_vars)
        return self._horovod.apply(self, lambda: base.apply_gradients(pairs, *args, **kwargs))


class _New(_InFront):
    """Optimizers of TensorFlow 2.11 and newer."""

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> list[tuple[Any, Any]]:
        """Gradients of ``loss``, reduced over the ranks."""
        base: Any = super()
        return self._horovod.reduce(base.compute_gradients(loss, var_list, tape))


class _Old(_InFront):
    """Their predecessors, in ``tf.keras.optimizers.legacy``."""

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
    """The class of distributed optimizers that behave like ``kind``: its name, derived from it.

    It also has the name by which ``kind`` is known in files, so that Keras loads them without Horovod.
    """
    if kind not in _derived:
        front = _New if hasattr(kind, "compute_gradients") else _Old
        names = {name: value for name, value in vars(kind).items() if name.startswith("_keras_api_names")}
        _derived[kind] = type(kind.__name__, (front, kind), {"__module__": MODULE, "__doc__": kind.__doc__, **names})
    return _derived[kind]


def is_distributed(optimizer: Any) -> bool:
    """Whether an optimizer, or the one inside a loss scaling one, reduces gradients."""
    return any(
        isinstance(getattr(each, "_horovod", None), LegacyDistribution) for each in (optimizer, unwrapped(optimizer))
    )


def distribute(optimizer: Any, settings: Settings) -> Any:
    """A distributed optimizer with the configuration of ``optimizer``, which stays as it is.

    Raises:
        ValueError: it is no optimizer of Keras 2, or distributed already.
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


def distribute_in_place(optimizer: Any, settings: Settings) -> Any:
    """Make ``optimizer`` itself, with all its state, a distributed one."""
    optimizer.__class__ = derived(type(optimizer))
    return adopt(optimizer, settings)


def adopt(optimizer: Any, settings: Settings) -> Any:
    """Give an instance of a derived class what it needs to reduce gradients."""
    kind = type(optimizer).__name__
    object.__setattr__(optimizer, "_horovod", LegacyDistribution(settings, kind))
    object.__setattr__(optimizer, "_name", settings.name or f"Distributed{kind}")
    leave_out_xla(tf.keras.Model)
    return optimizer


def load(keras: Any, filepath: Any, custom_optimizers: Any, custom_objects: Any, settings: Settings) -> Any:
    """Load a model with Keras 2; its optimizer keeps its state and is distributed afterwards."""
    model = keras.models.load_model(filepath, custom_objects=users_objects(custom_optimizers, custom_objects))
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not is_distributed(optimizer):
        distribute_in_place(unwrapped(optimizer), settings)
    return model
