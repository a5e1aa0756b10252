"""The findings of the rules, as they are shown and written."""

from __future__ import annotations

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """One thing that the rules have found.

    Attributes:
        kind: ``raised``, ``link``, ``killed``, ``stopped``, ``left``, ``lost``, ``engine``, ``mismatch``, ``apart``,
            ``silent``, ``held``, ``inside``, ``straggler`` or ``nothing``.
        ranks: the ranks that caused it; for ``inside``, the ranks that are inside.
        text: the finding in words.
        collective: the name of the collective that it concerns; "" if there is none.
        process_set: the number of the collective's process set.
        occurrence: the position among the collectives of that name, from 1; 0 if there is none.
        waiting: ranks that wait because of it.
        call_sites: by rank, the line of the script.
    """

    kind: str
    ranks: list[int]
    text: str
    collective: str = ""
    process_set: int = 0
    occurrence: int = 0
    waiting: list[int] = []
    call_sites: dict[int, str] = {}
