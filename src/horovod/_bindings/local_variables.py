"""Variables whose gradients stay on each rank, because each rank has a part of the model of its own."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from horovod.core.lifecycle.process_set import ProcessSet


def checked_layers(layers: Any, is_layer: Callable[[Any], bool], kind: str) -> list[Any]:
    """``local_layers=`` of an optimizer or tape, one layer or several, as a list.

    Args:
        kind: the class of layers, for the error.

    Raises:
        ValueError: something else than layers.
    """
    several = [] if layers is None else [layers] if is_layer(layers) else layers
    found = list(several) if isinstance(several, Iterable) else [several]
    if not all(map(is_layer, found)):
        raise ValueError(f"All local layers must be of {kind} type.")
    return found


class LocalVariables:
    """The local variables of one optimizer or tape; all others are shared, and their gradients are reduced.

    Args:
        process_set: the ranks that reduce the shared gradients.
        scale: local gradients are divided by the size of ``process_set``. A local parameter's step is then as long as for an
            average of its own gradient and zeros from all other ranks.
        key: what identifies a variable, the same for every object that stands for it.
    """

    def __init__(self, process_set: ProcessSet, scale: bool, key: Callable[[Any], Hashable]) -> None:
        self._process_set = process_set
        self._scale = scale
        self._key = key
        self._keys: set[Hashable] = set()
        self._layers: list[Any] = []

    def add(self, variable: Any) -> None:
        """Keep the gradients of ``variable`` local."""
        self._keys.add(self._key(variable))

    def add_layers(self, layers: Sequence[Any]) -> None:
        """Keep the gradients of these layers' ``trainable_weights`` local, also of those that a layer makes later."""
        self._layers.extend(layers)

    def keys(self) -> set[Hashable]:
        """The keys of all local variables that exist by now."""
        return self._keys | {self._key(weight) for layer in self._layers for weight in layer.trainable_weights}

    def __contains__(self, variable: Any) -> bool:
        return self._key(variable) in self.keys()

    def split(self, variables: Sequence[Any]) -> tuple[list[int], list[int]]:
        """The indices of the local variables, and of the shared ones."""
        keys = self.keys()
        local: list[int] = []
        shared: list[int] = []
        for index, variable in enumerate(variables):
            (local if self._key(variable) in keys else shared).append(index)
        return local, shared

    def divisor(self) -> int:
        """The divisor of local gradients; 1 if they are not divided.

        Raises:
            ValueError: the process set is not registered.
        """
        return (self._process_set.size() or 1) if self._scale and self._process_set.included() else 1
