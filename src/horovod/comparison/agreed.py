"""Numbers that identify variables on all ranks: their positions in the broadcasts of variables, which all ranks make in the
same order.

Names cannot identify variables on several ranks, because Keras numbers layers in the order in which a rank makes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from horovod.comparison.samples import parameters_are_replaced
from horovod.core.lifecycle.context import before_run, running

_ATTRIBUTE = "_horovod_number"
_LONGEST = 200
_counted: dict[int, int] = {}
"""How many variables have got a number, by the generation of the runtime in this process."""


def number(variables: Iterable[Any]) -> None:
    """Give numbers to variables that have just been broadcast to all ranks. In a process that joins an elastic job and has not
    met the others, nothing was broadcast.
    """
    guard = before_run()
    if guard is not None and guard.alone:
        return
    parameters_are_replaced()
    generation = running().generation
    for variable in variables:
        position = _counted.get(generation, 0)
        _counted[generation] = position + 1
        setattr(_of_framework(variable), _ATTRIBUTE, (generation, position))


def describe(variables: Sequence[Any]) -> str:
    """The numbers of these variables in their order, such as ``0-3, 6``; "" if a variable has no number."""
    generation, numbers = running().generation, []
    for variable in variables:
        made, position = getattr(_of_framework(variable), _ATTRIBUTE, (None, 0))
        if made != generation:
            return ""
        numbers.append(position)
    return shortened(spans(numbers))


class VariableNumbers:
    """The numbers of some variables, asked for again and again: :func:`describe`.

    Args:
        variables: variables that have values outside of graphs, so none of them refers to a graph.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        self._variables = list(variables)
        self._counted: tuple[int, int] = (-1, 0)
        self._text = ""

    def __call__(self) -> str:
        generation = running().generation
        counted = (generation, _counted.get(generation, 0))
        if counted != self._counted:
            self._text, self._counted = describe(self._variables), counted
        return self._text


def spans(numbers: Sequence[int]) -> str:
    """Integers as text, with consecutive ones as a range."""
    found: list[list[int]] = []
    for position in numbers:
        if found and position == found[-1][1] + 1:
            found[-1][1] = position
        else:
            found.append([position, position])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def shortened(text: str) -> str:
    """The text, or a shorter one with a hash of it: equal only for equal texts."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}... ({hashlib.sha256(text.encode()).hexdigest()[:12]})"


def _of_framework(variable: Any) -> Any:
    return getattr(variable, "_value", variable) if hasattr(variable, "path") else variable
