"""The fragments of a model: which of its parameters are sent together. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def divide(sizes: Mapping[str, int], fragments: int, elements: Mapping[int, int] | None = None) -> dict[str, int]:
    """The fragment of each parameter: the largest parameter first, each to the fragment with the fewest elements so far.

    Args:
        sizes: the number of elements of each parameter.
        fragments: how many there are.
        elements: the number of elements that fragments have already.

    Returns:
        The fragments by parameter, the largest parameter first.
    """
    filled = [(elements or {}).get(fragment, 0) for fragment in range(fragments)]
    divided = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        divided[name] = min(range(fragments), key=filled.__getitem__)
        filled[divided[name]] += sizes[name]
    return divided
