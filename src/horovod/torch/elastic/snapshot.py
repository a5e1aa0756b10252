"""Copies of a state in memory that is reused by the next copy, so that a commit allocates nothing.

Tensors in host memory are copied at once. Tensors on a device are copied to page-locked host memory on a separate stream, while
the device computes: readers of the tensors are not delayed, and writers wait (:meth:`Snapshot.before_write`).
"""

from __future__ import annotations

import copy
from typing import Any

import torch

_PLAIN = (int, float, str, bool, bytes, type(None))

DEVICES = {"cuda"}
"""Kinds of devices whose streams are known; ``torch.<kind>`` has the functions of ``torch.cuda``. Others are copied at once."""

KINDS: set[type] = {torch.Tensor}
"""Classes of tensors that are nothing but their elements. Others are cloned."""


def page_locked_like(tensor: torch.Tensor) -> torch.Tensor:
    """New page-locked host memory for a tensor on a device."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


class Snapshot:
    """One state's copy: nested dictionaries, lists and tuples of tensors and of anything that ``copy.deepcopy`` takes."""

    def __init__(self) -> None:
        self._kept: Any = None
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self._streams: dict[torch.device, Any] = {}
        self._copied: list[tuple[torch.device, Any]] = []

    @torch.no_grad()
    def take(self, state: Any) -> None:
        """Replace the copy by one of ``state``. Nothing may write to tensors on devices before :meth:`before_write`."""
        self._arrive()
        self._targets, self._sources = [], []
        self._kept = self._place(state, self._kept)
        by_device: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for target, source in zip(self._targets, self._sources, strict=True):
            targets, sources = by_device.setdefault(source.device, ([], []))
            targets.append(target)
            sources.append(source)
        for device, (targets, sources) in by_device.items():
            if device.type in DEVICES:
                self._copy_beside(device, targets, sources)
            else:
                torch._foreach_copy_(targets, sources)
        self._targets = []
        if not self._copied:
            self._sources = []  # otherwise their memory must not be reused before it is read

    def before_write(self) -> None:
        """Make the current stream of each device wait until the copy is complete. The host does not wait."""
        for device, event in self._copied:
            getattr(torch, device.type).current_stream(device).wait_event(event)

    def value(self) -> Any:
        """The copy itself, in host memory. A caller that keeps or changes it must take a ``copy.deepcopy``."""
        self._arrive()
        return self._kept

    def _arrive(self) -> None:
        for _, event in self._copied:
            event.synchronize()
        self._copied = []
        self._sources = []

    def _place(self, value: Any, kept: Any) -> Any:
        """The memory for ``value``: that of the last copy, if it fits. Records what is to be copied."""
        if isinstance(value, torch.Tensor):
            return self._place_tensor(value, kept)
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, dict):
            made = copy.copy(value)  # of its class, with its attributes, such as the metadata of a module's state
            before = kept if isinstance(kept, dict) else {}
            for key, each in value.items():
                made[key] = self._place(each, before.get(key))
            return made
        if type(value) in (list, tuple):
            olds = kept if type(kept) is type(value) and len(kept) == len(value) else [None] * len(value)
            return type(value)(self._place(each, old) for each, old in zip(value, olds, strict=True))
        return copy.deepcopy(value)

    def _place_tensor(self, value: torch.Tensor, kept: Any) -> torch.Tensor:
        value = value.detach()
        if type(value) not in KINDS or value.layout is not torch.strided or value.is_quantized:
            return value.clone()
        if not (isinstance(kept, torch.Tensor) and kept.shape == value.shape and kept.dtype == value.dtype):
            on_device = value.device.type in DEVICES
            kept = page_locked_like(value) if on_device else torch.empty(value.shape, dtype=value.dtype)
        target: torch.Tensor = kept
        self._targets.append(target)
        self._sources.append(value)
        return target

    def _copy_beside(self, device: torch.device, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        module = getattr(torch, device.type)
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = module.Stream(device)
        written = module.Event()
        written.record(module.current_stream(device))
        stream.wait_event(written)
        with module.stream(stream):
            torch._foreach_copy_(targets, sources, non_blocking=True)
            event = module.Event()
            event.record(stream)
        self._copied.append((device, event))
