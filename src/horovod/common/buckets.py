"""How gradients are put into buckets, which travel as one request each. The same in every binding.

Gradients become ready roughly in the reverse order of the parameters, so buckets are cut from the end. Where communication
overlaps, the first two are small so that it starts early. Every rank must cut alike: only names, shapes, types and what is
the same on all ranks decide.
"""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from horovod.common.util import split_list
from horovod.core.lifecycle.context import running

FIRST_BYTES = 1 << 20
OVERLAPPING_BYTES = 16 << 20
ONE_BUCKET = sys.maxsize


def bucket_limit(on_processor: bool) -> int:
    """How many bytes are best in a bucket, unless the user says otherwise; the same on all ranks.

    With cores to spare, or on other devices, communication of early buckets hides behind the rest of backward. Where every core
    computes there is nothing to hide behind: two threads that take turns on a core only disturb each other's caches, and
    everything in one piece after backward is faster (2 ranks on 2 cores: 2 % of a step).
    """
    context = running()
    if context.config.bucket_bytes:
        return context.config.bucket_bytes
    return ONE_BUCKET if context.crowded and on_processor else OVERLAPPING_BYTES


def cut(sizes: Sequence[tuple[Hashable, int]], limit: int) -> list[list[int]]:
    """Cut parameters into buckets of one kind and at most ``limit`` bytes, last ones first.

    A parameter larger than the limit is a bucket of its own.

    Args:
        sizes: of each parameter in order: what it must have in common with others in its bucket, and its bytes.

    Returns:
        Of each bucket, the indices of its parameters.
    """
    buckets: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}
    for index in reversed(range(len(sizes))):
        kind, size = sizes[index]
        members, filled = filling.get(kind, ([], 0))
        bound = min(limit, FIRST_BYTES) if len(buckets) <= 1 and limit != ONE_BUCKET else limit
        if not members or filled + size > bound:
            members, filled = [], 0
            buckets.append(members)
        members.append(index)
        filling[kind] = (members, filled + size)
    return buckets


def chosen_groups(groups: Any, num_groups: int, stacklevel: int) -> Any:
    """``groups=`` of an optimizer, or the older ``num_groups=``, which warns, where that alone is given."""
    if num_groups == 0:
        return groups
    warnings.warn("Parameter `num_groups` has been replaced by `groups`", DeprecationWarning, stacklevel=stacklevel + 1)
    return num_groups if groups is None else groups


def check_groups(groups: Any, kind: str, key: Callable[[Any], Hashable]) -> int | list[list[Any]] | None:
    """``groups=`` of an optimizer, with lists of its own.

    Args:
        kind: what the lists are of, in the binding's words.
        key: what makes two references the same member; may refuse one.

    Raises:
        ValueError: neither a positive number nor lists of members that are all different.
    """
    if groups is None:
        return None
    if isinstance(groups, int) and not isinstance(groups, bool) and groups > 0:
        return groups
    if not isinstance(groups, list) or not all(isinstance(group, list | tuple) for group in groups):
        raise ValueError(f"groups should be a non-negative integer or a list of list of {kind}.")
    members = [key(member) for group in groups for member in group]
    if len(set(members)) != len(members):
        what = "parameter" if kind == "torch.Tensor" else "variable"
        raise ValueError(f"A {what} can only appear once in groups.")
    return [list(group) for group in groups]


def cut_by_groups(members: Sequence[Hashable], groups: int | Sequence[Sequence[Hashable]]) -> list[list[int]]:
    """The buckets a user asked for: a number of them, or lists of members; what no list names stands alone.

    Args:
        members: what makes each one itself, in order; groups may name others, too.

    Returns:
        Of each bucket, the indices of its members. No bucket is empty.
    """
    if isinstance(groups, int):
        return [part for part in split_list(range(len(members)), groups) if part]
    places = {member: index for index, member in enumerate(members)}
    listed = [[places.pop(member) for member in group if member in places] for group in groups]
    return [bucket for bucket in listed if bucket] + [[index] for index in places.values()]


_named: Counter[tuple[int, str]] = Counter()
"""How many optimizers of each signature each generation has."""


def optimizer_name(signature: object) -> str:
    """What the ranks call an optimizer: the same on all that make the same ones in the same order, and no other's.

    Args:
        signature: what tells it from most others, the same on all ranks; the others are counted, by generation.
    """
    digest = hashlib.sha256(repr(signature).encode()).hexdigest()[:8]
    key = running().generation, digest
    _named[key] += 1
    return f"DistributedOptimizer.{digest}.{_named[key]}"
