"""What a compressor remembers, in an optimizer's ``state_dict()``: by parameter name, what is alike on all ranks apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from horovod.torch.compression.bucket_compression import BucketCompressor
from horovod.torch.optimizer.buckets import Slot
from horovod.torch.optimizer.settings import Settings

MEMORY = "horovod_compression"
"""The key in ``state_dict()``: ``rank`` and ``size``, who saved it; ``common``, what all ranks remember alike; ``own``."""


def saved_memory(slots: Iterable[Slot], settings: Settings) -> dict[str, Any] | None:
    """What to save, the tensors themselves and no copies; None if there is nothing to remember."""
    compressor = settings.compression
    if not isinstance(compressor, BucketCompressor):
        return None
    common: dict[str, dict[str, Any]] = {}
    own: dict[str, dict[str, Any]] = {}
    for slot in slots:
        for key, value in slot.memory.items():
            (common if key in compressor.common else own).setdefault(slot.name, {})[key] = value
    process_set = settings.process_set
    return {"rank": process_set.rank(), "size": process_set.size(), "common": common, "own": own}


def for_all_ranks(state: dict[str, Any]) -> dict[str, Any]:
    """A state dictionary without what is this rank's own; the ranks that load it keep theirs."""
    return {**state, MEMORY: {**state[MEMORY], "own": None}} if MEMORY in state else state


def load_memory(slots: Iterable[Slot], settings: Settings, saved: dict[str, Any]) -> None:
    """Remember what was saved instead of what is remembered now.

    Args:
        saved: as :func:`saved_memory` made it. An ``own`` of None leaves what this rank has of its own.
    """
    if not isinstance(settings.compression, BucketCompressor):
        return
    common = settings.compression.common
    mine = (saved["rank"], saved["size"]) == (settings.process_set.rank(), settings.process_set.size())
    own = saved["own"]
    for slot in slots:
        kept = {} if own is not None else {key: value for key, value in slot.memory.items() if key not in common}
        if own is not None and mine:
            kept = own.get(slot.name, {})
        slot.memory = {
            key: _copied(value, slot.parameter) for key, value in {**saved["common"].get(slot.name, {}), **kept}.items()
        }


def _copied(value: Any, parameter: torch.Tensor) -> Any:
    return value.to(parameter.device, copy=True) if isinstance(value, torch.Tensor) else value
