"""What one wrapped Keras 3 optimizer remembers, and how it turns local gradients into those of all ranks."""

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
"""What identifies a variable, whichever of its wrappers is at hand."""


class Reducer(Protocol):
    """One optimizer's gradients on one backend."""

    def __call__(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        cut: Sequence[Sequence[int]] | None,
        op: ReduceOp,
        factor: float,
    ) -> list[Any]:
        """The reduced gradients. Called while a graph is traced, or each time where there is none.

        Args:
            variables: whose gradients they are, for names in errors.
            cut: which gradients travel together, as indices; None: the backend knows best.
            factor: multiplies the result.
        """

    def reduced_before(self, gradient: Any, variable: Any) -> bool:
        """Whether ``horovod.tensorflow.DistributedGradientTape`` has returned ``gradient``, so that it is applied as it is."""
        return False


def variable_name(variable: Any) -> str:
    """As the user sees it."""
    return str(getattr(variable, "path", None) or getattr(variable, "name", "variable"))


class Distribution:
    """The distributed part of one optimizer.

    Attributes:
        pending: the variables whose accumulated gradients are about to be applied.
        noticed: Keras has passed accumulated gradients on to be reduced.
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
        """Whether gradients that come now are reduced already."""
        return self._suspended > 0

    @contextmanager
    def reduced_already(self) -> Iterator[None]:
        """A block in which the optimizer gets gradients that need no reduction."""
        self._suspended += 1
        try:
            yield
        finally:
            self._suspended -= 1

    @contextmanager
    def accumulating(self, gradients: Sequence[Any], variables: Sequence[Any]) -> Iterator[None]:
        """A block in which Keras adds ``gradients`` to earlier ones. What of them was reduced before stays so as a sum."""
        self._arrived = self._reduced_before(gradients, variables)
        try:
            yield
        finally:
            self._arrived = None

    def _reduced_before(self, gradients: Sequence[Any], variables: Sequence[Any]) -> set[Any]:
        pairs = zip(gradients, variables, strict=True)
        return {self._key(variable) for gradient, variable in pairs if self._reducer.reduced_before(gradient, variable)}

    def keep_local(self, variable: Any) -> None:
        """Leave gradients of ``variable`` to each rank."""
        self._local.add(variable)

    def keep_layers_local(self, layers: Sequence[Any]) -> None:
        """Leave gradients of whatever trainable weights these layers have, or will have once they are built."""
        self._local.add_layers(layers)

    def active(self) -> bool:
        """Whether gradients are reduced: this rank is a member of the process set, and not the only one."""
        return self.settings.active()

    def accumulation(self, steps: int | None) -> float:
        """What turns Keras's means over ``steps`` calls into what was asked for: sums, unless they are to be averaged."""
        return float(self.settings.passes) if steps and not self.settings.average_aggregated else 1.0

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], factor: float = 1.0) -> list[Any]:
        """The gradients to apply instead of ``gradients``; None stays None.

        Every member of the process set calls it for the same variables, in the same order.

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
        # Such a "gradient" is the new value of the variable: scales and largest values of 8-bit floats.
        largest = self._exchange(gradients, variables, overwriting, ReduceOp.MAX, 1.0)
        for index, value in zip(overwriting, largest, strict=True):
            result[index] = value
        return result

    def _exchange(
        self, gradients: Sequence[Any], variables: Sequence[Any], chosen: Sequence[int], op: ReduceOp, factor: float
    ) -> list[Any]:
        """The gradients with the indices ``chosen``, reduced."""
        if not chosen:
            return []
        mine = [variables[index] for index in chosen]
        return self._reducer([gradients[index] for index in chosen], mine, self._cut(mine), op, factor)

    def _cut(self, variables: Sequence[Any]) -> list[list[int]] | None:
        """Which of ``variables`` travel together: a number of parts, or as the user listed them, the others each alone."""
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
