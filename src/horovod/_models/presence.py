"""Which gradients each rank has, and what the ranks reduce if they have different ones.

A rank may lack the gradient of a variable that other ranks have, for example if each rank trains another head of a model. The
positions of the gradients that a rank has are part of its requests (``Request.alike``), so ranks with different ones are told
before anything is reduced. Then they exchange what they have (:func:`exchange`), and try again: what some rank has is reduced,
with zeros for the ranks that lack it. What no rank has is not sent. The usual case, in which all have the same, costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from horovod.common.objects import allgather_object
from horovod.core.lifecycle.process_set import ProcessSet
from horovod.core.negotiation.agreement import list_ranks

_SHOWN = 4
"""How many variables an error names."""


class Kind(IntEnum):
    """What a rank has of one variable's gradient. If ranks differ, the largest is what they reduce."""

    ABSENT = 0
    SPARSE = 1
    """With indices of at most 32 bits."""
    SPARSE_LONG = 2
    DENSE = 3


def in_words(kinds: Sequence[int]) -> str:
    """The positions of the gradients that exist: ``gradients 0-3, 5 of 8``. Ranks with the same ones have the same text."""
    present = [position for position, kind in enumerate(kinds) if kind]
    if len(present) == len(kinds):
        text = f"all {len(kinds)} gradients"
    elif present:
        text = f"gradients {list_ranks(present).split(' ', 1)[1]} of {len(kinds)}"
    else:
        text = f"none of {len(kinds)} gradients"
    for kind, what in ((Kind.SPARSE, "sparse"), (Kind.SPARSE_LONG, "sparse by int64")):
        some = [position for position, each in enumerate(kinds) if each == kind]
        text += f" ({what}: {list_ranks(some).split(' ', 1)[1]})" if some else ""
    return text


class Difference:
    """What the ranks have, if they have different gradients.

    Attributes:
        kinds: what they reduce, by position.
    """

    def __init__(self, found: Sequence[tuple[int, Sequence[int], Sequence[str]]]) -> None:
        self._found = found
        self.kinds = [Kind(max(each)) for each in zip(*(kinds for _, kinds, _ in found), strict=True)]

    def lacking(self) -> str:
        """Which gradients are missing on which ranks: ``rank 1 has no gradient of head_0/kernel, which rank 0 has; ...``."""
        parts = []
        for rank, kinds, labels in self._found:
            missing = [position for position, kind in enumerate(kinds) if not kind and self.kinds[position]]
            if missing:
                shown = ", ".join(labels[position] for position in missing[:_SHOWN])
                more = f" and {len(missing) - _SHOWN} others" if len(missing) > _SHOWN else ""
                owners = [other for other, theirs, _ in self._found if theirs[missing[0]]]
                verb = "has" if len(owners) == 1 else "have"
                parts.append(f"rank {rank} has no gradient of {shown}{more}, which {list_ranks(owners)} {verb}")
        return "; ".join(parts)


def exchange(
    rank: int, kinds: Sequence[int], labels: Sequence[str], process_set: ProcessSet, name: str
) -> Difference | None:
    """What the ranks have. None: they all have the same. Every member must call it.

    Args:
        rank: the global rank.
        kinds: what this rank has, by position.
        labels: the variables' names, for errors.
        name: identifies the call.
    """
    found = allgather_object((rank, list(map(int, kinds)), list(labels)), name=name, process_set=process_set)
    if all(theirs == found[0][1] for _, theirs, _ in found) or len({len(theirs) for _, theirs, _ in found}) > 1:
        return None
    return Difference(found)
