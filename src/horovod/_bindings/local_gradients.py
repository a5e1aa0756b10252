"""Gradients of a model with parts that each rank trains alone: a rank keeps those of its part; the ranks reduce the others.

The same in every binding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def reduce_shared(
    gradients: Sequence[Any], kept: Mapping[int, Any], reduce: Callable[[list[int]], Sequence[Any]]
) -> list[Any]:
    """The gradients to apply, in the order of ``gradients``.

    Args:
        gradients: of this rank.
        kept: by index, what is applied for a gradient that is not reduced.
        reduce: takes the indices of all other gradients, and returns these reduced, in this order.
    """
    shared = [index for index in range(len(gradients)) if index not in kept]
    results = [kept.get(index) for index in range(len(gradients))]
    for index, gradient in zip(shared, reduce(shared), strict=True):
        results[index] = gradient
    return results
