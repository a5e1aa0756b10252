"""The mistakes in training loops that ``HOROVOD_DEBUG`` finds, and the messages about them, for all frameworks. Pure.

A binding examines its tensors and compares the ranks; this module evaluates the results.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from horovod._base.config import DEBUG
from horovod.comm.datatypes import Array

FIRST_STEPS = 3
"""The number of steps in which ranks must have the same data for a message. Two steps may be equal by accident."""
_DIGEST_BYTES = 6


class NotFinite(NamedTuple):
    """The numbers of elements of a gradient that are not finite.

    Attributes:
        elements: the number of all elements.
        nan, infinite: the numbers of elements that are NaN, and positive or negative infinity.
    """

    elements: int
    nan: int
    infinite: int


def not_finite(values: Array) -> NotFinite | None:
    """The numbers, of any type, that are not finite; None if all are finite."""
    finite = int(np.isfinite(values).sum())
    if finite == values.size:
        return None
    nan = int(np.isnan(values).sum())
    return NotFinite(values.size, nan, values.size - finite - nan)


def digest(content: bytes | memoryview) -> str:
    """A digest of bytes: equal for equal bytes, and almost always different for others."""
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()


def digest_of(values: Array) -> str:
    """A digest of all bytes of an array."""
    return digest(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def same_in_all(steps: Sequence[Mapping[int, bytes]]) -> list[list[int]]:
    """The groups of ranks that have held the same in each step, of several ranks each.

    Args:
        steps: by step, what each rank held. A rank that held nothing (``b""``) belongs to no group.
    """
    ranks = set(steps[0]).intersection(*steps) if steps else set()
    groups: dict[tuple[bytes, ...], list[int]] = {}
    for rank in sorted(ranks):
        held = tuple(step[rank] for step in steps)
        if all(held):
            groups.setdefault(held, []).append(rank)
    return [group for group in groups.values() if len(group) > 1]


def account_of_gradient(rank: int, name: str, step: int, owner: str, found: NotFinite) -> str:
    """The message about a gradient that is not finite.

    Args:
        owner: the owner of the gradient, for example ``the optimizer made at FILE:LINE``.
    """
    return (
        f"rank {rank}: the gradient of {name!r} is not finite in step {step} of {owner}: of "
        f"{found.elements} elements {found.nan} are NaN and {found.infinite} are infinite. It is the first such gradient "
        "of this rank. With a gradient scaler, single steps may have infinite gradients: the scaler skips them."
    )


def account_of_batches(ranks: Sequence[int], what: str, advice: str) -> str:
    """The message about ranks that have the same data.

    Args:
        what: what they have done, for example ``have loaded the same batches in the first 3 steps``.
        advice: how each rank gets its own part of the data.
    """
    return (
        f"ranks {', '.join(map(str, ranks))} {what}, so they all learn the same from them. Give each rank its own part of the "
        f"data: {advice}. ({DEBUG} compares them.)"
    )


class GradientWatch:
    """The gradients of one optimizer on this rank before they are reduced. Each is shown once in each step.

    The operations of a graph run in any order and on several threads, so the number of a step is counted for each gradient
    by itself.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times: dict[str, int] = {}
        self._digests: dict[int, dict[str, str]] = {}  # by step and name, of the first steps
        self._found = False

    def see(self, name: str, values: Array) -> tuple[int, NotFinite] | None:
        """Look at a gradient. Returns the step and what is not finite, for the first gradient of which that is so."""
        with self._lock:
            step = self._times[name] = self._times.get(name, 0) + 1
            look = not self._found
        bad = not_finite(values) if look else None
        seen = digest_of(values) if step <= FIRST_STEPS and np.any(values) else ""
        with self._lock:
            if seen:
                self._digests.setdefault(step, {})[name] = seen
            if bad is None or self._found:
                return None
            self._found = True
        return step, bad

    def taken(self, step: int) -> bytes:
        """A digest of all gradients of a step that is over; ``b""`` if all of them were zero. Forgets the step.

        Names do not count: Keras numbers the models of a process, and a rank may have made more of them.
        """
        with self._lock:
            found = self._digests.pop(step, {})
        return digest(repr(sorted(found.values())).encode()).encode() if found else b""
