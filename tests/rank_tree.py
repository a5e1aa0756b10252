"""The tree in which engines combine the contributions of ranks, stated level by level. Shares no code with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

_T = TypeVar("_T")


def in_tree(combine: Callable[[_T, _T], _T], leaves: Sequence[_T]) -> _T:
    """The root of a complete binary tree with these leaves, whose last level is filled from the left."""
    level = list(leaves)
    extra = len(level) - (1 << len(level).bit_length() - 1)
    level = [*map(combine, level[: 2 * extra : 2], level[1 : 2 * extra : 2]), *level[2 * extra :]]
    while len(level) > 1:
        level = [*map(combine, level[::2], level[1::2])]
    return level[0]
