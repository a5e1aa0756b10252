"""How an optimizer's gradients are put into buckets, and one bucket's way through a step.

A bucket is a fixed set of parameters that travel as one request. Gradients become ready roughly in the reverse order of the
parameters, so buckets are cut from the end. Where communication overlaps, the first two are small so that it starts early.
"""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from horovod.common.util import split_list
from horovod.core.context import running
from horovod.core.handle import Handle
from horovod.core.messages import Request
from horovod.torch.bucket_compression import Reduction

FIRST_BYTES = 1 << 20
OVERLAPPING_BYTES = 16 << 20
ONE_BUCKET = sys.maxsize


def bucket_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """How large buckets are best, unless the user says otherwise; the same on all ranks.

    With cores to spare, or on other devices, communication of early buckets hides behind the rest of backward. Where every core
    computes there is nothing to hide behind: two threads that take turns on a core only disturb each other's caches, and
    everything in one piece after backward is faster (2 ranks on 2 cores: 2 % of a step).
    """
    context = running()
    if context.config.bucket_bytes:
        return context.config.bucket_bytes
    on_processor = all(parameter.device.type == "cpu" for parameter in parameters)
    return ONE_BUCKET if context.crowded and on_processor else OVERLAPPING_BYTES


_TOO_MANY_PASSES = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally."
)
ZERO_GRAD_TOO_EARLY = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
    "This would clear gradients that are being reduced."
)

_built: Counter[tuple[int, str]] = Counter()
"""How many optimizers of each signature this generation has: tells two optimizers over like parameters apart."""


def identity(slots: Iterable[Slot]) -> str:
    """A name for an optimizer, the same on all ranks that build the same ones in the same order."""
    text = repr([(slot.name, tuple(slot.parameter.shape), str(slot.parameter.dtype)) for slot in slots])
    signature = hashlib.sha256(text.encode()).hexdigest()[:8]
    generation = running().generation
    _built[generation, signature] += 1
    return f"DistributedOptimizer.{signature}.{generation}.{_built[generation, signature]}"


class Slot:
    """One parameter's place in a bucket.

    Attributes:
        name: of the parameter.
        passes: backward passes that are still to come before its gradient travels.
        sparse: its gradients were sparse the last time there were any.
    """

    __slots__ = ("bucket", "name", "parameter", "passes", "ready", "sparse")

    def __init__(self, parameter: torch.nn.Parameter, name: str, passes: int) -> None:
        self.parameter = parameter
        self.name = name
        self.passes = passes
        self.ready = False
        self.sparse = False
        self.bucket: Bucket

    def count_pass(self) -> bool:
        """A backward pass has added to the gradient; returns whether that was the last one the whole bucket waited for.

        Raises:
            AssertionError: it had all its passes already.
        """
        if self.ready:
            raise AssertionError(_TOO_MANY_PASSES)
        self.passes -= 1
        if self.passes:
            return False
        self.ready = True
        self.bucket.waiting -= 1
        return self.bucket.waiting == 0


class Sender(Protocol):
    """What :func:`listen` calls: the distributed part of an optimizer."""

    def send(self, bucket: Bucket) -> None:
        """Every gradient of ``bucket`` is ready."""


def listen(sender: Sender, slots: Iterable[Slot]) -> None:
    """Have ``sender.send(bucket)`` called, during backward, whenever the last gradient of a bucket is ready.

    Ends when nobody holds the sender any more, so that a dropped optimizer lets go of its parameters.
    """
    reference = weakref.ref(sender)
    hooks: list[Any] = []
    for slot in slots:
        parameter: Any = slot.parameter  # PyTorch leaves this method untyped
        hooks.append(parameter.register_post_accumulate_grad_hook(_hook(reference, slot)))
    weakref.finalize(sender, _remove, hooks).atexit = False


def _hook(reference: Callable[[], Sender | None], slot: Slot) -> Callable[[torch.Tensor], None]:
    def gradient_is_ready(_: torch.Tensor) -> None:
        sender = reference()
        if sender is not None and slot.count_pass():
            sender.send(slot.bucket)

    return gradient_is_ready


def _remove(hooks: Iterable[Any]) -> None:
    for hook in hooks:
        hook.remove()


class Bucket:
    """Parameters that travel together.

    Attributes:
        waiting: slots whose gradient is not ready yet.
        request: of the last submission, reused while its tensors stay the same.
        key: what that request was made for.
        handle: of what is under way, or None.
        memory: of its compressor, from step to step.
    """

    __slots__ = ("handle", "key", "memory", "name", "request", "slots", "waiting")

    def __init__(self, name: str, slots: Sequence[Slot]) -> None:
        self.name = name
        self.slots = list(slots)
        self.waiting = len(self.slots)
        self.request: Request | None = None
        self.key: object = None
        self.handle: Handle | Reduction | None = None
        self.memory: dict[str, Any] = {}
        for slot in self.slots:
            slot.bucket = self

    def reset(self, passes: int) -> None:
        """Wait for ``passes`` backward passes anew."""
        self.handle = None
        self.waiting = len(self.slots)
        for slot in self.slots:
            slot.passes = passes
            slot.ready = False


def by_size(slots: Sequence[Slot], limit: int) -> list[list[Slot]]:
    """Cut ``slots`` (in parameter order) into buckets of one dtype and device and at most ``limit`` bytes, last ones first.

    A parameter larger than the limit is a bucket of its own.
    """
    cut: list[list[Slot]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[Slot], int]] = {}
    for slot in reversed(slots):
        parameter = slot.parameter
        kind = (parameter.dtype, parameter.device)
        size = parameter.numel() * parameter.element_size()
        members, filled = filling.get(kind, ([], 0))
        bound = min(limit, FIRST_BYTES) if len(cut) <= 1 and limit != ONE_BUCKET else limit
        if not members or filled + size > bound:
            members, filled = [], 0
            cut.append(members)
        members.append(slot)
        filling[kind] = (members, filled + size)
    return cut


def by_groups(slots: Sequence[Slot], groups: int | Iterable[Iterable[torch.Tensor]]) -> list[list[Slot]]:
    """The buckets a user asked for: a number of them, or lists of parameters; what no list names stands alone."""
    if isinstance(groups, int):
        return [part for part in split_list(list(slots), groups) if part]
    by_parameter = {slot.parameter: slot for slot in slots}
    chosen = [[by_parameter.pop(p) for p in group if p in by_parameter] for group in groups]  # type: ignore[call-overload]  # looked up by identity
    return [members for members in chosen if members] + [[slot] for slot in by_parameter.values()]
