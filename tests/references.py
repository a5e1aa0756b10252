"""Which objects are still referred to: how tests see that a table does not grow for ever."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def kept(texts: Sequence[str]) -> int:
    """How many of the texts anything but this sequence refers to. They must be objects of their own, not constants."""
    alone = list(map(str, range(10**9, 10**9 + len(texts))))
    before, counts = [sys.getrefcount(each) for each in alone], [sys.getrefcount(each) for each in texts]
    return sum(count > least for count, least in zip(counts, before, strict=True))
