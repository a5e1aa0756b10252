"""The distributed part of one Keras 3 optimizer: its settings, its local variables, and the reduction of its gradients.

The position of a gradient is that of its variable among all variables of the optimizer. So gradients of different variables are
never reduced together, even if ranks lack some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from horovod._bindings.bucket_division import cut_by_groups
from horovod._bindings.local_gradients import reduce_shared
from horovod._bindings.local_variables import LocalVariables
from horovod._keras.guarding import OptimizerGuard
from horovod._keras.settings import KerasSettings
from horovod._models.arrival import Arrival, ChangeWarning
from horovod.comm.reduction import ReduceOp

Key = Callable[[Any], Any]
"""Returns a key that is equal for all objects that stand for the same variable."""


class Reducer(Protocol):
    """Reduces one optimizer's gradients on one backend.

    Attributes:
        guard: compares the optimizer between the ranks in each step. None: nothing is compared.
    """

    guard: OptimizerGuard | None = None

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
            gradients: the gradients; None for a variable that has none on this rank. The result has a gradient if any rank
                has it, and None otherwise.
            variables: the variables of the gradients, for names in errors.
            cut: the indices of the gradients of each request. None: the backend decides.
            op: the reduction.
            factor: multiplies the result.
        """

    def watch(self, variables: Sequence[Any]) -> None:
        """Begin to track the gradients of these variables, for :meth:`arrivals`."""
        return

    def arrivals(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Arrival]:
        """The states of gradients that are about to be applied, none of which is None."""
        return [Arrival.UNKNOWN] * len(gradients)

    def applied(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Let the ranks compare gradients that were reduced before, and that the script may have changed since.

        Args:
            gradients: those that are about to be applied; None for a variable whose gradient is not such a one.
            variables: all variables of the optimizer.

        Returns:
            The gradients to apply instead. In a graph, they are ready when it has looked at them.
        """
        return list(gradients)

    def hand_out(self, given: Sequence[Any], reduced: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Remember that the script gets these reduced gradients instead of ``given``, and will apply them. Returns them."""
        return list(reduced)


def variable_name(variable: Any) -> str:
    """The name of a variable in messages."""
    return str(getattr(variable, "path", None) or getattr(variable, "name", "variable"))


class Distribution:
    """The distributed part of one optimizer.

    Attributes:
        pending: the variables whose accumulated gradients are about to be applied.
        noticed: whether Keras has called the method that reduces accumulated gradients.

    Args:
        settings: the arguments of the optimizer.
        reducer: reduces gradients on the backend.
        key: returns the key of a variable.
        known: returns all variables of the optimizer, in its order; none before it is built.
    """

    def __init__(
        self, settings: KerasSettings, reducer: Reducer, key: Key, known: Callable[[], Sequence[Any]] = tuple
    ) -> None:
        self.settings = settings
        self.pending: Sequence[Any] | None = None
        self.noticed = False
        self._known = known
        self._warning = ChangeWarning("apply() of the distributed optimizer")
        self._warns = True
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
        """A context in which the optimizer gets gradients that are reduced already."""
        self._suspended += 1
        try:
            yield
        finally:
            self._suspended -= 1

    @contextmanager
    def accumulating(self, gradients: Sequence[Any], variables: Sequence[Any]) -> Iterator[None]:
        """A context in which Keras adds ``gradients`` to earlier ones. Gradients that are reduced already are not reduced
        again."""
        self._arrived = self._reduced_before(gradients, variables)
        try:
            yield
        finally:
            self._arrived = None

    def _reduced_before(self, gradients: Sequence[Any], variables: Sequence[Any]) -> set[Any]:
        """The keys of the variables whose gradients are reduced already. Warns about gradients that were changed but not
        reduced."""
        pairs = [pair for pair in zip(gradients, variables, strict=True) if pair[0] is not None]
        arrivals = self._reducer.arrivals([each for each, _ in pairs], [each for _, each in pairs])
        found = {Arrival.REDUCED: set[Any](), Arrival.CHANGED: set[Any]()}
        labels = []
        local = self._local.keys()
        for (_, variable), arrived in zip(pairs, arrivals, strict=True):
            key = self._key(variable)
            if arrived in found:
                found[arrived].add(key)
            if arrived is Arrival.CHANGED and key not in local:
                labels.append(variable_name(variable))
        if self._warns and self.active():
            self._warning.give(labels)
        return found[Arrival.REDUCED]

    def watch(self, variables: Sequence[Any]) -> None:
        """Begin to track the gradients of these variables."""
        self._reducer.watch(variables)

    def reduce_for_script(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduce gradients that the script changes before it applies them.

        Raises:
            ValueError: only other ranks have the gradient of some variable, which is not among ``variables``.
        """
        self._warns = False
        try:
            reduced, of = self.reduce(gradients, variables)
        finally:
            self._warns = True
        self.refuse_others(variables, of, "hvd.reduce_gradients")
        return self._reducer.hand_out(gradients, reduced, variables)

    def refuse_others(self, variables: Sequence[Any], found: Sequence[Any], where: str) -> None:
        """Raise ValueError if :meth:`reduce` has found gradients of more variables than these."""
        if len(found) > len(variables):
            more = ", ".join(variable_name(each) for each in found[len(variables) :][:4])
            raise ValueError(
                f"{where}: other ranks have gradients of {more}, and this rank has passed none. Pass the gradients of the same "
                "variables on every rank, with zeros for those that a rank does not use"
            )

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
        """The factor for gradients that Keras has averaged over ``steps`` calls. It turns them into sums, unless averages are
        wanted."""
        return float(self.settings.passes) if steps and not self.settings.average_aggregated else 1.0

    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], factor: float = 1.0
    ) -> tuple[list[Any], list[Any]]:
        """The gradients to apply instead of ``gradients``, and their variables.

        A gradient that this rank lacks and another has counts as zeros. A gradient that no rank has stays None. Every member of
        the process set must call it.

        Args:
            gradients: this rank's gradients, in the order of ``variables``.
            variables: the variables of the gradients.
            factor: multiplies the result.

        Returns:
            The gradients of ``variables``, followed by those of further variables whose gradients only other ranks have.
        """
        given = list(variables)
        everything, positions = self._everything(given)
        every: list[Any] = [None] * len(everything)
        for position, gradient in zip(positions, gradients, strict=True):
            every[position] = gradient
        reduced = self._reduced(every, everything, factor)
        others = sorted(set(range(len(everything))) - set(positions))
        more = [position for position in others if reduced[position] is not None]
        returned = [*given, *(everything[position] for position in more)]
        return [reduced[position] for position in [*positions, *more]], returned

    def _everything(self, variables: Sequence[Any]) -> tuple[list[Any], list[int]]:
        """All variables of the optimizer, and the positions of ``variables`` among them."""
        known = list(self._known())
        positions = {self._key(variable): position for position, variable in enumerate(known)}
        keys = [self._key(variable) for variable in variables]
        if len(set(keys)) < len(keys) or not all(key in positions for key in keys):
            return list(variables), list(range(len(keys)))
        return known, [positions[key] for key in keys]

    def _reduced(self, gradients: Sequence[Any], variables: Sequence[Any], factor: float) -> list[Any]:
        """The gradients to apply, of all variables of the optimizer."""
        local = self._local.keys()
        before = self._reduced_before(gradients, variables) if self._arrived is None else self._arrived
        settings = self.settings
        local_factor = factor / self._local.divisor()
        kept: dict[int, Any] = {}
        overwriting: list[int] = []
        absent: list[int] = []
        for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            key = self._key(variable)
            if _is_overwritten(variable):
                kept[index] = gradient
                if gradient is not None:
                    overwriting.append(index)
            elif key in before:
                kept[index] = None if gradient is None else scaled(gradient, factor)
            elif key in local:
                kept[index] = None if gradient is None else scaled(gradient, local_factor)
            elif gradient is None:
                absent.append(index)
        if not self.active() or (before and len(kept) + len(absent) == len(variables)):
            kept.update(dict.fromkeys(absent))  # gradients that no rank has, if all others were reduced before
        if not self.active():
            return reduce_shared(gradients, kept, lambda shared: [scaled(gradients[i], factor) for i in shared])
        result = reduce_shared(
            gradients, kept, lambda shared: self._exchange(gradients, variables, shared, settings.op, factor)
        )
        # The "gradient" of an overwriting variable is its new value, for example the scale of 8-bit floats.
        largest = self._exchange(gradients, variables, overwriting, ReduceOp.MAX, 1.0)
        for index, value in zip(overwriting, largest, strict=True):
            result[index] = value
        return result if self._arrived is not None else self._looked_at(result, variables, before - local)

    def _looked_at(self, gradients: Sequence[Any], variables: Sequence[Any], reduced_before: set[Any]) -> list[Any]:
        """The gradients to apply, after a look at those that were reduced before."""
        theirs = [
            gradient is not None and self._key(each) in reduced_before and not _is_overwritten(each)
            for gradient, each in zip(gradients, variables, strict=True)
        ]
        if not any(theirs):
            return list(gradients)
        own = zip(gradients, theirs, strict=True)
        seen = self._reducer.applied([gradient if its else None for gradient, its in own], variables)
        return [new if its else old for old, new, its in zip(gradients, seen, theirs, strict=True)]

    def _exchange(
        self, gradients: Sequence[Any], variables: Sequence[Any], chosen: Sequence[int], op: ReduceOp, factor: float
    ) -> list[Any]:
        """Reduce the gradients with the indices ``chosen``."""
        if not chosen:
            return []
        mine = [variables[index] for index in chosen]
        return self._reducer([gradients[index] for index in chosen], mine, self._cut(mine), op, factor)

    def _cut(self, variables: Sequence[Any]) -> list[list[int]] | None:
        """The indices of the variables of each request. A variable that is in no list of the user has its own request."""
        groups = self.settings.groups
        if groups is None:
            return None
        lists = groups if isinstance(groups, int) else [[self._key(variable) for variable in group] for group in groups]
        return cut_by_groups([self._key(variable) for variable in variables], lists)


def _is_overwritten(variable: Any) -> bool:
    """Whether the "gradient" of a variable is its new value."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def scaled(gradient: Any, factor: float) -> Any:
    """``gradient * factor``, of the type of ``gradient``. A factor of 1 returns the gradient itself."""
    if factor == 1.0:
        return gradient
    if hasattr(gradient, "dense_shape"):  # tf.IndexedSlices
        return type(gradient)(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor
