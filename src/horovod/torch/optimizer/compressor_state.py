"""The memory of a compressor in an optimizer's ``state_dict()``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from horovod.torch.compression.bucket_compression import BucketCompressor
from horovod.torch.optimizer.buckets import ParameterState
from horovod.torch.optimizer.settings import OptimizerSettings

MEMORY = "horovod_compression"
"""The key in ``state_dict()``. Its value is a dictionary:

``rank``, ``size``: the rank that saved it, and the size of the process set. ``common``: by parameter name, the values that are
equal on all ranks. ``own``: by parameter name, the values of that rank; None: they were left out.
"""


def saved_memory(slots: Iterable[ParameterState], settings: OptimizerSettings) -> dict[str, Any] | None:
    """The memory to save. Tensors are not copied. None if the compressor keeps no state."""
    common_keys = _common(settings)
    if common_keys is None:
        return None
    common: dict[str, dict[str, Any]] = {}
    own: dict[str, dict[str, Any]] = {}
    for slot in slots:
        for key, value in slot.memory.items():
            (common if key in common_keys else own).setdefault(slot.name, {})[key] = value
    process_set = settings.process_set
    return {"rank": process_set.rank(), "size": process_set.size(), "common": common, "own": own}


def for_all_ranks(state: dict[str, Any]) -> dict[str, Any]:
    """A state dictionary without this rank's own values. Ranks that load it keep their own values."""
    return {**state, MEMORY: {**state[MEMORY], "own": None}} if MEMORY in state else state


def load_memory(slots: Iterable[ParameterState], settings: OptimizerSettings, saved: dict[str, Any]) -> None:
    """Replace the memory with a saved one. Does nothing if the compressor keeps no state.

    Args:
        saved: the result of :func:`saved_memory`. If its ``own`` is None, this rank keeps its own values. If another rank, or a
            rank of a process set of another size, has saved it, this rank's own values are discarded.
    """
    common = _common(settings)
    if common is None:
        return
    mine = (saved["rank"], saved["size"]) == (settings.process_set.rank(), settings.process_set.size())
    own = saved["own"]
    for slot in slots:
        kept = {} if own is not None else {key: value for key, value in slot.memory.items() if key not in common}
        if own is not None and mine:
            kept = own.get(slot.name, {})
        slot.memory = {
            key: _copied(value, slot.parameter) for key, value in {**saved["common"].get(slot.name, {}), **kept}.items()
        }


def _common(settings: OptimizerSettings) -> frozenset[str] | None:
    """The keys of a parameter's memory whose values are equal on all ranks; None if there is no memory."""
    if isinstance(settings.compression, BucketCompressor):
        return settings.compression.common
    return frozenset() if settings.form else None


def _copied(value: Any, parameter: torch.Tensor) -> Any:
    return value.to(parameter.device, copy=True) if isinstance(value, torch.Tensor) else value
