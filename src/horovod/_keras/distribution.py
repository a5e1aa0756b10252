"""The distributed part of one Keras 3 optimizer: its settings, its local variables, and the reduction of its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from horovod._keras.settings import Settings
from horovod.comm.reduction import ReduceOp
from horovod.common.buckets import cut_by_groups
from horovod.common.local_gradients import reduce_shared
from horovod.common.local_variables import LocalVariables

Key = Callable[[Any], Any]
"""Returns a key that is equal for all objects that stand for the same variable."""


class Reducer(Protocol):
    """Reduces one optimizer's gradients on one backend."""

    def __call__(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        cut: Sequence[Sequence[int]] | None,
        op: ReduceOp,
        factor: float,
    ) -> list[Any]:
        """Return the reduced gradients. It is called when a graph is traced, or in every step if there is no graph.

        Args:
            variables: the variables of the gradients, for names in errors.
            cut: the indices of the gradients of each request. None: the backend decides.
            factor: multiplies the result.
        """

    def reduced_before(self, gradient: Any, variable: Any) -> bool:
        """Whether a ``horovod.tensorflow.DistributedGradientTape`` has already reduced ``gradient``."""
        return False


def variable_name(variable: Any) -> str:
    """The name of a variable in messages."""
    return str(getattr(variable, "path", None) or getattr(variable, "name", "variable"))


class Distribution:
    """The distributed part of one optimizer.

    Attributes:
        pending: the variables whose accumulated gradients are about to be applied.
        noticed: Keras has called the method that reduces accumulated gradients.
    """

    def __init__(self, settings: Settings, reducer: Reducer, key: Key) -> None:
        self.settings = settings
        self.pending: Sequence[Any] | None = None
        self.noticed = False
        self._reducer = reducer
        self._key = key
        self._local = LocalVariables(settings.process_set, settings.scale_local, key)
        self._suspended = 0
        self._arrived: set[Any] | None = None

    @property
    def suspended(self) -> bool:
        """Whether this is inside :meth:`reduced_already`."""
        return self._suspended > 0

    @contextmanager
    def reduced_already(self) -> Iterator[None]:
        """A block in which the optimizer gets gradients that are reduced already."""
        self._suspended += 1
        try:
            yield
        finally:
            self._suspended -= 1

    @contextmanager
    def accumulating(self, gradients: Sequence[Any], variables: Sequence[Any]) -> Iterator[None]:
        """A block in which Keras adds ``gradients`` to earlier ones. Those that are reduced already are not reduced again."""
        self._arrived = self._reduced_before(gradients, variables)
        try:
            yield
        finally:
            self._arrived = None

    def _reduced_before(self, gradients: Sequence[Any], variables: Sequence[Any]) -> set[Any]:
        pairs = zip(gradients, variables, strict=True)
        return {self._key(variable) for gradient, variable in pairs if self._reducer.reduced_before(gradient, variable)}

    def keep_local(self, variable: Any) -> None:
        """Do not reduce the gradients of ``variable``."""
        self._local.add(variable)

    def keep_layers_local(self, layers: Sequence[Any]) -> None:
        """Do not reduce the gradients of these layers' trainable weights, also of weights that a layer makes later."""
        self._local.add_layers(layers)

    def active(self) -> bool:
        """Whether this rank reduces gradients; see :meth:`ReductionSettings.active`."""
        return self.settings.active()

    def accumulation(self, steps: int | None) -> float:
        """The factor for gradients that Keras has averaged over ``steps`` calls. It makes sums, unless means are wanted."""
        return float(self.settings.passes) if steps and not self.settings.average_aggregated else 1.0

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], factor: float = 1.0) -> list[Any]:
        """The gradients to apply instead of ``gradients``. None stays None.

        Every member of the process set must call it for the same variables in the same order.

        Args:
            factor: multiplies the result.
        """
        local = self._local.keys()
        before = self._reduced_before(gradients, variables) if self._arrived is None else self._arrived
        settings = self.settings
        local_factor = factor / self._local.divisor()
        kept: dict[int, Any] = {}
        overwriting: list[int] = []
        for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is None:
                kept[index] = None
            elif getattr(variable, "overwrite_with_gradient", False):
                kept[index] = gradient
                overwriting.append(index)
            elif self._key(variable) in before:
                kept[index] = scaled(gradient, factor)
            elif self._key(variable) in local:
                kept[index] = scaled(gradient, local_factor)
        if not self.active():
            return reduce_shared(gradients, kept, lambda shared: [scaled(gradients[i], factor) for i in shared])
        result = reduce_shared(
            gradients, kept, lambda shared: self._exchange(gradients, variables, shared, settings.op, factor)
        )
        # Such a "gradient" is the new value of its variable, for example the scale of 8-bit floats.
        largest = self._exchange(gradients, variables, overwriting, ReduceOp.MAX, 1.0)
        for index, value in zip(overwriting, largest, strict=True):
            result[index] = value
        return result

    def _exchange(
        self, gradients: Sequence[Any], variables: Sequence[Any], chosen: Sequence[int], op: ReduceOp, factor: float
    ) -> list[Any]:
        """Reduce the gradients with the indices ``chosen``."""
        if not chosen:
            return []
        mine = [variables[index] for index in chosen]
        return self._reducer([gradients[index] for index in chosen], mine, self._cut(mine), op, factor)

    def _cut(self, variables: Sequence[Any]) -> list[list[int]] | None:
        """The indices of the variables of each request. A variable that no list of the user contains has its own request."""
        groups = self.settings.groups
        if groups is None:
            return None
        lists = groups if isinstance(groups, int) else [[self._key(variable) for variable in group] for group in groups]
        return cut_by_groups([self._key(variable) for variable in variables], lists)


def scaled(gradient: Any, factor: float) -> Any:
    """``gradient * factor``, of the type of ``gradient``. A factor of 1 returns the gradient itself."""
    if factor == 1.0:
        return gradient
    if hasattr(gradient, "dense_shape"):  # tf.IndexedSlices
        return type(gradient)(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor
