"""Which ready decisions travel together. Pure.

Decisions that became ready while the worker thread was busy are sorted into batches of one key each, never larger than the
threshold (a single larger tensor is a batch of its own). Any order is right as long as all ranks use the same one, so a
batch may take up what became ready later than the start of another batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from horovod.core.coordination.negotiator import ReadyRequest


def fuse(ready: Sequence[ReadyRequest], threshold: int, groups_apart: bool = False) -> list[list[ReadyRequest]]:
    """Cut ``ready`` into batches.

    Args:
        threshold: bytes a batch may hold; 0 puts every decision in a batch of its own.
        groups_apart: never mix one request with another, so that each group of tensors is fused only with itself.
    """
    if threshold == 0 or groups_apart or len(ready) == 1:
        return [[item] for item in ready]
    batches: list[list[ReadyRequest]] = []
    others: dict[tuple[object, ...], tuple[list[ReadyRequest], int]] = {}
    key, batch, size = None, list[ReadyRequest](), 0
    for item in ready:
        if item.key is None:
            batches.append([item])
            continue
        if item.key is not key:  # equal keys are mostly one object, which is seen at once
            if key is not None:
                others[key] = batch, size
            key = item.key
            batch, size = others.get(key, ([], 0))
        if not batch or size + item.size > threshold:
            batch, size = [], 0
            batches.append(batch)
        batch.append(item)
        size += item.size
    return batches
