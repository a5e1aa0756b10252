"""The findings of the rules, as they are shown and written."""

from __future__ import annotations

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """One thing that the rules have found.

    Attributes:
        kind: ``raised``, ``link``, ``killed``, ``stopped``, ``left``, ``lost``, ``engine``, ``mismatch``, ``apart``,
            ``silent``, ``held``, ``inside``, ``straggler`` or ``nothing``.
        ranks: the ranks that caused it; for ``inside``, the ranks that are inside.
        text: what was found.
        collective: the name of the collective that it is about; "" if there is none.
        process_set: of the collective.
        occurrence: the n-th collective of that name; 0 if there is none.
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
