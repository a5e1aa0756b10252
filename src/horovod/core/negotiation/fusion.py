"""Cuts ready decisions into batches (tensor fusion). Pure.

A batch has decisions of one key, and is no larger than the threshold; a larger tensor is a batch of its own. The coordinator
sends the batches in order to all ranks, so any order is right. A decision may join a batch that was begun before another
batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from horovod.core.negotiation.ready_request import ReadyRequest


def fuse(ready: Sequence[ReadyRequest], threshold: int, groups_apart: bool = False) -> list[list[ReadyRequest]]:
    """Cut ``ready`` into batches.

    Args:
        threshold: the size of a batch in bytes; 0: every decision is a batch of its own.
        groups_apart: every request is a batch of its own, so a group of tensors is fused only with itself.
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
        if item.key is not key:  # equal keys are usually the same object
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
