"""Which gradients each rank has, and what the ranks reduce if they have different ones.

A rank may lack the gradient of a variable that other ranks have, for example if each rank trains another head of a model.
The positions of the gradients that a rank has are part of its requests (``Request.alike``), so a difference is noticed
before anything is reduced. Then the ranks exchange which gradients they have (:func:`exchange`), and try again. The ranks
reduce a gradient that any rank has, with zeros for ranks that lack it. They do not send a gradient that no rank has. In the
usual case, all ranks have the same gradients, and this costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from horovod._bindings.objects import allgather_object
from horovod.comparison.agreed import shortened, spans
from horovod.core.lifecycle.process_set import ProcessSet


class GradientKind(IntEnum):
    """The kind of one variable's gradient on a rank. If ranks differ, they reduce the largest kind."""

    ABSENT = 0
    SPARSE = 1
    """With indices of at most 32 bits."""
    SPARSE_LONG = 2
    DENSE = 3


def describe(kinds: Sequence[int]) -> str:
    """The positions of the gradients that exist: ``gradients 0-3, 5 of 8``. Ranks with the same ones have the same text."""
    present = [position for position, kind in enumerate(kinds) if kind]
    if len(present) == len(kinds):
        text = f"all {len(kinds)} gradients"
    elif present:
        text = f"gradients {spans(present)} of {len(kinds)}"
    else:
        text = f"none of {len(kinds)} gradients"
    for kind, what in ((GradientKind.SPARSE, "sparse"), (GradientKind.SPARSE_LONG, "sparse by int64")):
        some = [position for position, each in enumerate(kinds) if each == kind]
        text += f" ({what}: {spans(some)})" if some else ""
    return shortened(text)


def exchange(kinds: Sequence[int], process_set: ProcessSet, name: str) -> list[GradientKind] | None:
    """The kinds of gradients that the ranks reduce, by position. None if all ranks have the same. Every member must call it.

    Args:
        kinds: the kinds of this rank's gradients, by position.
        name: identifies the call.
    """
    return to_reduce(allgather_object(list(map(int, kinds)), name=name, process_set=process_set))


def to_reduce(found: Sequence[Sequence[int]]) -> list[GradientKind] | None:
    """The kinds to reduce, by position, from the kinds of each rank. None if all are equal, or if their numbers differ."""
    if all(each == found[0] for each in found) or len({len(each) for each in found}) > 1:
        return None
    return [GradientKind(max(each)) for each in zip(*found, strict=True)]
