"""``DistributedOptimizer`` for Keras 3: a class derived from the optimizer's own that reduces gradients first.

Gradients are reduced at the beginning of ``apply``, before Keras checks, unscales or clips them and applies weight decay and
moving averages. All of these see the gradients of the whole job, as in training with one process. If Keras accumulates
gradients over several calls, only the accumulated gradients are reduced, in the call that applies them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import keras

from horovod._keras import compilation, last_steps, loss_scale, naming
from horovod._keras.backends import backend
from horovod._keras.copies import copy_exclusions, copy_state, rebuilt, without_horovod
from horovod._keras.distribution import Distribution
from horovod._keras.guarding import OptimizerGuard
from horovod._keras.settings import MODULE, KerasSettings


class CallableList(list[Any]):
    """Variables, for scripts that write ``optimizer.variables`` and for those that write ``optimizer.variables()``."""

    def __call__(self) -> CallableList:
        return self


class _OptimizerOverrides:
    """The methods that override those of the wrapped optimizer's class."""

    _horovod: Distribution
    _made_with: KerasSettings | None = None
    """The arguments of the optimizers of this class; of the last one if they differ."""

    @classmethod
    def from_config(cls, config: Any, *args: Any, **options: Any) -> Any:
        """A distributed optimizer with this configuration, and with the arguments of the last one of this class."""
        made = _from_config(cls, config, *args, **options)
        if cls._made_with is not None:
            adopt(made, replace(cls._made_with, name=made.name))
        return made

    def __reduce__(self) -> Any:
        own: Any = self
        return loaded, (without_horovod(own), self._horovod.settings)

    @property
    def variables(self) -> CallableList:
        base: Any = super()
        return CallableList(base.variables)

    def register_local_var(self, var: Any) -> None:
        """Do not reduce the gradient of ``var``. With ``scale_local_gradients`` it is divided by the number of ranks."""
        self._horovod.keep_local(var)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Reduce gradients over the ranks, and make a step with the result. Every rank must call it."""
        base: Any = super()
        horovod = self._horovod
        gradients = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        if horovod.suspended or not gradients or not self._fitting(gradients, trainable_variables):
            base.apply(gradients, trainable_variables)
        elif not self._accumulates():
            reduced, variables = self._reduced(gradients, trainable_variables)
            with horovod.reduced_already():
                base.apply(reduced, variables)
        else:
            horovod.noticed = False
            known = self._known(trainable_variables)
            with horovod.accumulating(gradients, known):
                base.apply(gradients, trainable_variables)
            if not horovod.noticed and backend.traced():  # eagerly, Keras clips only when it applies
                raise RuntimeError(
                    f"{type(self).__name__} does not accumulate gradients as Keras's optimizers do, so Horovod cannot "
                    "reduce them; use backward_passes_per_step=1 and no gradient_accumulation_steps"
                )

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """:meth:`apply` for the JAX backend. Returns the new values of the model's and the optimizer's variables."""
        base: Any = super()
        gradients = list(grads)
        if self._horovod.suspended or self._accumulates() or not self._fitting(gradients, None):
            return base.stateless_apply(optimizer_variables, grads, trainable_variables)
        with keras.StatelessScope(state_mapping=_state_of(self, optimizer_variables, trainable_variables)):
            reduced, _ = self._reduced(gradients, None)
        with self._horovod.reduced_already():
            return base.stateless_apply(optimizer_variables, reduced, trainable_variables)

    def build(self, variables: Any) -> None:
        base: Any = super()
        base.build(variables)
        horovod = getattr(self, "_horovod", None)  # not set yet while Keras makes the optimizer
        if horovod is not None:
            horovod.watch(list(variables))

    def _fitting(self, gradients: Sequence[Any], variables: Any) -> bool:
        """Whether there is a variable for each gradient. If not, Keras raises its own error."""
        own: Any = self
        return (own.built or variables is not None) and len(gradients) == len(self._known(variables))

    def _accumulates(self) -> bool:
        return bool(getattr(self, "gradient_accumulation_steps", None))

    def _reduced(self, gradients: Sequence[Any], variables: Any) -> tuple[list[Any], list[Any]]:
        """Reduce ``gradients``. Returns the gradients to apply, and their variables.

        A ``LossScaleOptimizer`` calls it too, because it checks gradients before this optimizer.
        """
        known = self._known(variables)
        _make(self, known)
        steps = loss_scale.unwrapped(self).gradient_accumulation_steps
        return self._horovod.reduce(gradients, known, self._horovod.accumulation(steps))

    def _known(self, variables: Any) -> list[Any]:
        own: Any = self
        return list(own._trainable_variables if variables is None else variables)

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        self._horovod.pending = list(trainable_variables)
        try:
            base: Any = super()
            base._backend_apply_gradients(grads, trainable_variables)
        finally:
            self._horovod.pending = None

    def _clip_gradients(self, grads: Any) -> Any:
        """Keras calls this with the gradients to apply. It passes accumulated gradients only in the call that applies them."""
        base: Any = super()
        horovod = self._horovod
        if horovod.pending is None or horovod.suspended or not self._accumulates():
            return base._clip_gradients(grads)
        horovod.noticed = True
        return base._clip_gradients(_when_due(self, list(grads), horovod.pending))


def _when_due(optimizer: Any, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
    """Reduce accumulated gradients in the call that applies them.

    On JAX, Keras clips in every call, and discards the result of calls that only accumulate. Those calls send nothing.
    """
    horovod: Distribution = optimizer._horovod
    steps = optimizer.gradient_accumulation_steps
    factor = horovod.accumulation(steps)

    def reduce() -> list[Any]:
        reduced, of = horovod.reduce(gradients, variables, factor)
        horovod.refuse_others(variables, of, "the step that applies accumulated gradients")
        return reduced

    if backend.name() != "jax":
        return reduce()
    import jax

    due = (optimizer._iterations.value + 1) % steps == 0
    reduced: list[Any] = jax.lax.cond(due, reduce, lambda: gradients)
    return reduced


def _state_of(optimizer: Any, optimizer_variables: Any, trainable_variables: Any) -> list[tuple[Any, Any]]:
    """Pairs of the variables and their values in a stateless step."""
    own = zip(optimizer.variables, optimizer_variables, strict=False)  # Keras checks the numbers
    return [*zip(optimizer._trainable_variables, trainable_variables, strict=False), *own]


def _make(optimizer: Any, variables: Sequence[Any]) -> None:
    """Build an optimizer that is not built, as Keras does in its first step."""
    if not optimizer.built:
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(list(variables))


_derived: dict[type[Any], type[Any]] = {}


def derived(kind: type[Any]) -> type[Any]:
    """The class of distributed optimizers that behave like ``kind``. It has the same name and is derived from ``kind``."""
    if kind not in _derived:
        _derived[kind] = type(
            kind.__name__, (_OptimizerOverrides, kind), {"__module__": MODULE, "__doc__": kind.__doc__}
        )
        naming.save_as(_derived[kind], kind)
    return _derived[kind]


def distribute(optimizer: Any, settings: KerasSettings) -> Any:
    """A distributed optimizer with the configuration and the state of ``optimizer``, which is not changed.

    The parts of a ``MultiOptimizer`` are not copied.

    Raises:
        ValueError: ``optimizer`` is not an optimizer of Keras 3, or it is distributed already.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(f"expected an instance of keras.optimizers.Optimizer, not {type(optimizer).__name__}")
    if loss_scale.is_distributed(optimizer):
        raise ValueError("this optimizer is a DistributedOptimizer already; wrap the original")
    _refuse_distribution()
    made = derived(type(optimizer))
    distributed = rebuilt(optimizer, made, partial(_from_config, made), settings.passes)
    adopt(distributed, settings)
    copy_exclusions(loss_scale.unwrapped(optimizer), loss_scale.unwrapped(distributed))
    copy_state(optimizer, distributed)
    return distributed


def distribute_in_place(optimizer: Any, settings: KerasSettings) -> Any:
    """Make ``optimizer`` itself distributed. It keeps its state. This is for the optimizer of a loaded model."""
    optimizer.__class__ = derived(type(optimizer))
    adopt(optimizer, settings)
    return optimizer


def loaded(optimizer: Any, settings: KerasSettings) -> Any:
    """The distributed optimizer that was pickled or copied, or ``optimizer`` itself where Horovod is not initialised.

    Args:
        optimizer: the optimizer that it has wrapped.

    Raises:
        ValueError: its process set does not exist here.
    """
    return distribute_in_place(optimizer, settings) if settings.serve_here(type(optimizer).__name__) else optimizer


def _from_config(kind: Any, *arguments: Any, **options: Any) -> Any:
    """An instance of ``kind`` that the wrapped class's ``from_config`` makes. It is not distributed yet."""
    found: Any = super(_OptimizerOverrides, kind)
    return found.from_config(*arguments, **options)


def adopt(optimizer: Any, settings: KerasSettings) -> None:
    """Make an optimizer of a class of :func:`derived` distributed."""
    type(optimizer)._made_with = settings
    itself = weakref.ref(optimizer)

    def known() -> list[Any]:
        own = itself()
        return list(own._trainable_variables) if own is not None and own.built else []

    reducer = backend.reducer(settings)
    reducer.guard = OptimizerGuard(optimizer, settings)
    horovod = Distribution(settings, reducer, optimizer._var_key, known)
    object.__setattr__(optimizer, "_horovod", horovod)
    horovod.watch(known())
    object.__setattr__(optimizer, "_name", settings.name or f"Distributed{type(optimizer).__name__}")
    loss_scale.check_reduced_gradients()
    if backend.name() == "tensorflow":
        compilation.turn_off_xla(keras.Model)
        if last_steps.loses_last_steps(keras.__version__):
            last_steps.patch_train_function(keras.Model)


def _refuse_distribution() -> None:
    distribution = getattr(keras.distribution, "distribution", lambda: None)()
    if distribution is not None:
        raise NotImplementedError(
            f"keras.distribution.{type(distribution).__name__} spreads a model over several devices of one process; "
            "with Horovod every process has one device. Leave out keras.distribution.set_distribution"
        )
