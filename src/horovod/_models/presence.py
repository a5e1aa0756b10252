"""Which gradients each rank has, and what the ranks reduce if they have different ones.

A rank may lack the gradient of a variable that other ranks have, for example if each rank trains another head of a model. The
positions of the gradients that a rank has are part of its requests (``Request.alike``), so ranks with different ones are told
before anything is reduced. Then they exchange what they have (:func:`exchange`), and try again: what some rank has is reduced,
with zeros for the ranks that lack it. What no rank has is not sent. The usual case, in which all have the same, costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from horovod._models.agreed import shortened, spans
from horovod.common.objects import allgather_object
from horovod.core.lifecycle.process_set import ProcessSet


class GradientKind(IntEnum):
    """What a rank has of one variable's gradient. If ranks differ, the largest is what they reduce."""

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
    """What the ranks reduce, by position. None: they all have the same. Every member must call it.

    Args:
        kinds: what this rank has, by position.
        name: identifies the call.
    """
    return to_reduce(allgather_object(list(map(int, kinds)), name=name, process_set=process_set))


def to_reduce(found: Sequence[Sequence[int]]) -> list[GradientKind] | None:
    """What the ranks reduce, by position, if each rank has one of ``found``. None: all have the same, or not as many."""
    if all(each == found[0] for each in found) or len({len(each) for each in found}) > 1:
        return None
    return [GradientKind(max(each)) for each in zip(*found, strict=True)]
