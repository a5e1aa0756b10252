"""The hook by which an optimizer hears of a parameter's gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from horovod.torch.optimizer.buckets import Slot


class Listener(Protocol):
    """Who wants to know."""

    def gradient_is_ready(self, slot: Slot, gradient: torch.Tensor) -> None:
        """A backward pass has added to the gradient of the parameter of ``slot``."""


_ours: set[int] = set()
"""PyTorch's numbers of the hooks that optimizers have."""


class GradientHook:
    """Tells ``listener()`` whenever a backward pass has added to a parameter's gradient.

    Of several optimizers over one parameter, the one made last hears of it; the others send it in their ``step()``.

    Args:
        listener: a weak reference, for a parameter must not keep an optimizer alive.
    """

    __slots__ = ("_handle", "_implementation", "_parameter")

    def __init__(self, slot: Slot, listener: Callable[[], Listener | None]) -> None:
        self._parameter: Any = slot.parameter  # PyTorch leaves its hooks untyped

        def hear(parameter: torch.Tensor) -> None:  # a plain function: calling an object takes three times as long
            present = listener()
            if present is not None:
                present.gradient_is_ready(slot, parameter.grad)  # type: ignore[arg-type]  # PyTorch has just set it

        for other in _ours.intersection(self._parameter._post_accumulate_grad_hooks or ()):
            del self._parameter._post_accumulate_grad_hooks[other]
        register: Callable[[Callable[[torch.Tensor], None]], Any] = self._parameter.register_post_accumulate_grad_hook
        self._handle = register(hear)
        self._implementation: int = self._parameter._cdata
        _ours.add(self._handle.id)

    def is_heard(self) -> bool:
        """Whether no other optimizer has taken the parameter over."""
        return self._handle.id in self._parameter._post_accumulate_grad_hooks

    def restore(self) -> None:
        """After ``module.to()`` with parameter swapping the parameter has another implementation, which calls no hooks."""
        if self._parameter._cdata != self._implementation:
            self._implementation = self._parameter._cdata
            self._parameter._post_accumulate_grad_hooks = self._parameter._post_accumulate_grad_hooks

    def remove(self) -> None:
        self._handle.remove()
        _ours.discard(self._handle.id)
