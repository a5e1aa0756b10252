"""Dynamic loss scaling with a distributed optimizer.

``model.compile`` puts a ``LossScaleOptimizer`` around the optimizer of a ``mixed_float16`` model. It skips a step if a
gradient is not finite. If each rank decided this by its own gradients, some ranks would skip the reduction, and the others
would wait for them. Around a distributed optimizer, gradients are therefore reduced before the ``LossScaleOptimizer`` checks
them. A gradient that is infinite on one rank is then not finite on any rank: all ranks skip the step, and their scales stay
equal.
"""

from __future__ import annotations

import functools
from typing import Any


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside a ``LossScaleOptimizer`` of Keras 3 or 2. Any other optimizer is returned unchanged."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return optimizer if inner is None else inner


def is_distributed(optimizer: Any) -> bool:
    """Whether an optimizer of any version of Keras, or the one inside a ``LossScaleOptimizer``, is distributed."""
    return any(hasattr(each, "_horovod") for each in (optimizer, unwrapped(optimizer)))


@functools.cache
def check_reduced_gradients() -> None:
    """Patch Keras 3's ``LossScaleOptimizer``, once per process. Only instances around a distributed optimizer are affected."""
    import keras

    kind = keras.optimizers.LossScaleOptimizer
    apply, stateless_apply = kind.apply, kind.stateless_apply

    def must_reduce(optimizer: Any) -> bool:
        inner = getattr(optimizer.inner_optimizer, "_horovod", None)
        return inner is not None and not inner.suspended and not hasattr(optimizer, "_horovod")

    @functools.wraps(apply)
    def reduced_apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if not must_reduce(self):
            return apply(self, grads, trainable_variables)
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        if not self.built:
            with keras.name_scope(self.name, caller=self):
                self.build(variables)
        reduced, of = self.inner_optimizer._reduced(list(grads), variables)
        with self.inner_optimizer._horovod.reduced_already():
            return apply(self, reduced, of)

    @functools.wraps(stateless_apply)
    def reduced_stateless_apply(self: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        if not must_reduce(self):
            return stateless_apply(self, optimizer_variables, grads, trainable_variables)
        mapping = zip(
            [*self._trainable_variables, *self.variables], [*trainable_variables, *optimizer_variables], strict=False
        )
        with keras.StatelessScope(state_mapping=list(mapping)):
            reduced, _ = self.inner_optimizer._reduced(list(grads), self._trainable_variables)
        with self.inner_optimizer._horovod.reduced_already():
            return stateless_apply(self, optimizer_variables, reduced, trainable_variables)

    kind.apply, kind.stateless_apply = reduced_apply, reduced_stateless_apply
